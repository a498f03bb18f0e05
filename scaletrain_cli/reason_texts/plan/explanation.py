"""The explanation of a layout (--explain): questions, notes on rows of numbers, answers, and conclusions."""

from scaletrain_cli.reasons import Text

TEXTS: dict[str, Text] = {
    "ask-training": Text("What trains"),
    "trains-share": Text("{trained:count} of {parameters:count} parameters ({share:percent})"),
    "group-trains": Text("{parameters:count} parameters, steps {first_step} to {last_step}"),
    "stage-trains": Text("{parameters:count} parameters train"),
    "backward-to-embedding": Text("The backward pass goes through all blocks to the embeddings"),
    "backward-to-block": Text(
        "The backward pass ends in block {block} of 0 to {last}, the lowest with a trained parameter; those below "
        "keep nothing for it"
    ),
    "backward-to-first-block": Text("The backward pass goes through all blocks"),
    "backward-in-head": Text("The backward pass ends before the blocks, which keep nothing for it"),
    "ask-reference": Text("What does the reference of dpo cost"),
    "reference-once": Text(
        "Its log-probabilities of {pairs:count} pairs are computed once, before step 1: {share:percent} of the run"
    ),
    "ask-states": Text("How much memory do weights, gradients and optimizer states need"),
    "ask-one-rank": Text("Does the run fit on one {device}, with a micro-batch of 1"),
    "ask-sharding": Text("Does it fit with data parallelism over all {ranks:whole} ranks, with states sharded by ZeRO"),
    "ask-tensor": Text(
        "Does it fit if the GPUs of a node share every layer (tensor parallelism, with ZeRO-{zero_stage})"
    ),
    "ask-pipeline": Text("Does it fit in pipeline stages, with tensor parallelism {tensor} in each stage"),
    "ask-axes": Text("What does each axis of the layout gain"),
    "ask-recomputation": Text("Must activations be recomputed"),
    "ask-compile": Text("Are the blocks compiled"),
    "ask-micro-batch": Text("How are the {batch:whole} {samples} of a step divided"),
    "ask-bubble": Text("How long do pipeline stages wait for each other"),
    "ask-communication": Text("What does communication cost"),
    "ask-winner": Text("Why this layout and not the next best"),
    "chosen": Text("chosen"),
    "bytes-per-parameter": Text("{bytes_per_parameter:.3g} bytes per parameter"),
    "recomputation-saves-nothing": Text("recomputation saves nothing"),
    "ranks-do-not-divide": Text("the batch or the ranks do not divide"),
    "the-spec-asks": Text("but the spec sets it"),
    "bubble-formula": Text("({stages} - 1) / ({micro_batches} x {chunks})"),
    "yes": Text("Yes"),
    "no": Text("No"),
    "states-total": Text("{bytes_per_parameter:.3g} bytes for each of {parameters:whole} parameters"),
    "states-of-device": Text("These states alone take {share:percent} of the memory of one {device}"),
    "one-rank-too-small": Text("No: even with recomputation it needs {times:.2f} times the memory of one"),
    "spread-states": Text("The states must be sharded over several ranks"),
    "yes-recomputing": Text("Yes, with recompute {mode}"),
    "data-parallel-is-enough": Text(
        "Data parallelism over {ranks:whole} ranks is enough; the model need not be split to fit"
    ),
    "batch-does-not-divide": Text(
        "No: a batch of {batch:whole} {samples} does not divide over {ranks:whole} data-parallel ranks"
    ),
    "share-sequences": Text("Some ranks must work on the same sequence"),
    "sharding-too-small": Text("No: what one {device} still holds is mostly {what}"),
    "cut-layers": Text("The layers themselves must be split"),
    "sharding-fits": Text("Yes: ZeRO-{zero_stage} with recompute {mode} takes {share:percent} of the memory"),
    "no-cut-needed": Text("Layers need not be split"),
    "cut-for-speed": Text("Layers need not be split to fit, but splitting may be faster"),
    "node-too-small": Text("No: even over all {gpus} GPUs of a node it does not fit"),
    "cut-into-stages": Text("The layers must be divided into pipeline stages across nodes"),
    "tensor-degree": Text(
        "The plan uses tensor parallelism {degree}; the fast link inside the node carries its traffic"
    ),
    "yes-from-stages": Text("Yes, with {stages} stages or more"),
    "stages-cost-a-bubble": Text(
        "Stages send only activations, which the network between nodes can carry; the cost is the pipeline bubble"
    ),
    "sequences-are-cut": Text("Sequences are split too: sequence {sequence}, context {context}"),
    "not-in-this-engine": Text("This engine version cannot run it yet"),
    "axis-needed-to-fit": Text("Without {axis} it does not fit"),
    "slower-without-axis": Text("Without {axis} a step is {share:percent} longer"),
    "faster-without-axis": Text("Without {axis} a step is {share:percent} shorter"),
    "axes-divide": Text("Each is needed for the ranks and the batch to divide"),
    "no-recomputation": Text("No: all activations fit"),
    "recomputation-to-fit": Text("Yes: without it they do not fit, so {mode} recomputation costs time"),
    "recomputation-chosen": Text("Yes: {mode}; less would leave too little memory free, or gain nothing"),
    "compiled": Text(
        "Yes: an eager step is modeled to take {gain:percent} longer. training.compile: false disables it"
    ),
    "not-compiled-as-asked": Text(
        "No, as the spec asks; compiled blocks are modeled to make a step {gain:percent} faster"
    ),
    "not-compiled": Text(
        "No: auto is off for experts, fp8, short runs and older GPUs. training.compile: true enables it"
    ),
    "batch-parts": Text("{batch:whole} = micro-batch {micro_batch} x accumulation {accumulation} x data {data}"),
    "micro-batch-takes-all": Text("A micro-batch is already the full share of a rank"),
    "larger-micro-batch-does-not-fit": Text("A larger micro-batch does not fit"),
    "larger-micro-batch-not-faster": Text("A larger micro-batch is no faster"),
    "larger-micro-batch-too-risky": Text(
        "A larger micro-batch leaves too little memory free for the error of the memory model"
    ),
    "bubble-share": Text("{share:percent} of the step, while the pipeline fills and drains"),
    "shrink-the-bubble": Text("More micro-batches, or virtual stages, would shrink it"),
    "no-communication": Text("Nothing: there is one rank"),
    "communication-share": Text("{share:percent} of the step is exposed communication"),
    "most-traffic": Text("Most bytes are sent for {axis} parallelism"),
    "only-layout": Text("It is the only layout that the spec allows"),
    "fastest-layout": Text(
        "Of {considered:whole} layouts it is the fastest that fits with a margin, or a simpler one that is as fast"
    ),
    "pinned-by-spec": Text("The spec sets {settings}"),
}
