"""Why layouts and clusters are not chosen, what would fit, and where prices and traces come from."""

from scaletrain_cli.reasons import Text

_OTHER_NETWORK = "For any other network leave it out and set cluster.inter_node_bandwidth, in bytes/s per GPU."

# Degrees and ZeRO stages that the search excludes. The texts follow the name of the axis.
_SEARCH_SPACE = {
    "leaves-the-node": Text("more ranks than the {gpus} GPUs of a node"),
    "too-many-stages": Text("more stages than layers, or than any published run"),
    "more-chunks-than-layers": Text("more virtual stages than layers"),
    "more-ranks-than-heads": Text("more ranks than {heads} heads"),
    "too-few-tokens": Text("fewer than {tokens} tokens of a sequence per rank"),
    "more-ranks-than-experts": Text("more ranks than experts"),
    "chunks-do-not-divide": Text("stages x virtual stages do not divide the layers"),
    "more-degrees-than-tried": Text("more degrees than the search tries"),
    "engine-lacks-axis": Text("this engine version supports only 1"),
    "framework-lacks-axis": Text("{framework} supports only 1"),
    "zero-with-pipeline": Text("zero_stage above 1: {framework} does not support it with a pipeline"),
    "no-zero-0": Text("zero_stage 0: {framework} does not support it with {precision}"),
    "no-zero-3": Text("zero_stage 3: {precision} matrix products keep the weights that it gathers"),
}

# Why a layout was not chosen: for one layout with its numbers, and "counted-" for many layouts.
_CHOICE = {
    "needs-memory": Text("does not fit: needs {peak:bytes} of {capacity:bytes}"),
    "does-not-fit": Text("does not fit"),
    "never-fits": Text("does not fit with any micro-batch"),
    "little-memory-left": Text("leaves little memory free: takes {share:percent} of the device"),
    "counted-little-memory-left": Text("leaves little memory free"),
    "fewer-negatives": Text("gradient accumulation reduces in-batch negatives"),
    "slower": Text("{ratio:.2f} times as slow"),
    "counted-slower": Text("slower"),
    "riskier": Text("{probability:percent} likely to run out of memory"),
    "may-stall": Text("{probability:percent} likely to stall between nodes, and then {ratio:.3g} times as slow"),
    "counted-may-stall": Text("likely to stall between nodes"),
    "counted-riskier": Text("more likely to run out of memory"),
    "faster-within-error": Text("{gain:percent} faster, within the error of the model, and more complex"),
    "counted-faster-within-error": Text("faster by less than the error of the model, and more complex"),
    "not-faster": Text("not faster, and more complex"),
    "offloads-needlessly": Text("uses offload, although it fits without"),
    "cannot-be-faster": Text("cannot be faster, by a lower bound on the step time"),
    "search-ended": Text("not evaluated: the search ends after {layouts} layouts, lowest bounds first"),
}

# A run that fits no layout, and the changes that would make it fit.
_INFEASIBLE = {
    "needed-memory": Text("{parts} = {peak:bytes}; {device} has {capacity:bytes}"),
    "smallest-layout": Text("{layout}"),
    "would-fit": Text("needs {peak:bytes} of {capacity:bytes} and {step:seconds} per step ({layout})"),
    "would-fit-unsupported": Text(
        "needs {peak:bytes} of {capacity:bytes} and {step:seconds} per step ({layout})",
        ("This engine version cannot run it yet.",),
    ),
    "no-layout-divides": Text("no layout of {name} divides over {gpus}"),
    "run-does-not-fit": Text(
        "{name} does not fit on {gpus}: the smallest layout needs {peak:bytes} per rank and a rank has {capacity:bytes}"
    ),
    "none-feasible": Text(
        "none of the {runs} runs fits; `scaletrain plan` of one run shows every change that would make it fit"
    ),
    "nothing-fits": Text("more or larger GPUs do not make it fit", ("Use a smaller model or a shorter seq_len.",)),
}

# Why a cluster was not chosen, and the time and cost of one that meets the limits.
_CLUSTERS = {
    "cluster-does-not-fit": Text("does not fit: {what}"),
    "cluster-does-not-divide": Text("does not divide: {what}"),
    "no-progress": Text("interruptions leave no progress"),
    "no-price": Text("no price is known: set cluster.price_per_gpu_hour"),
    "too-late": Text("{by:seconds} too late"),
    "over-budget": Text("{by:usd} over budget"),
    "more-gpus": Text("more GPUs than needed"),
    "slower-on-as-many": Text("slower with the same number of GPUs"),
    "slower-by": Text("{by:seconds} slower"),
    "costs-more": Text("costs {by:usd} more"),
    "no-cheaper": Text("no cheaper, and slower"),
    "at-least": Text("{cause}, at least"),
    "cluster-cannot-win": Text("no layout is better, by a lower bound on the step time"),
    "closest-cluster": Text("{takes}; {missed}"),
    "sufficient-cluster": Text("{takes}"),
    "scheduler-is-one-node": Text("cluster.scheduler = {scheduler} has only one node: use slurm to consider more"),
    "one-node-limit": Text("has only one node", ("Use slurm for more nodes.",)),
    "more-than-the-spec": Text("more than the {gpus} GPUs of the spec; to submit it, use --set cluster.nodes={nodes}"),
}

# No cluster within the limits, and limits that cannot be used.
_SIZING = {
    "no-cluster-fits": Text("the run fits on no cluster of at most {max_gpus:whole} GPUs"),
    "no-cluster-meets-limits": Text(
        "no cluster of at most {max_gpus:whole} GPUs meets {limits}; the closest one: {missed}"
    ),
    "larger-cluster-suffices": Text("{cause}; {gpus:whole} x {gpu} would do"),
    "needs-price": Text("an objective of cost, or a budget, needs a price", ("Set cluster.price_per_gpu_hour.",)),
    "less-than-one-node": Text(
        "at most {max_gpus} GPUs are less than one node of {gpus_per_node}",
        ("Use --max-gpus {gpus_per_node} or more, or fewer cluster.gpus_per_node.",),
    ),
    "unknown-objective": Text("unknown objective {given}", ("Use {allowed:or}.",)),
    "invalid-limit": Text("{option} is invalid"),
    "limit-not-parsed": Text("{detail}"),
    "limit-not-positive": Text("must be above 0"),
}

# Names that the catalogues lack.
_CATALOGUE = {
    "unknown-accelerator": Text("unknown accelerator {given}"),
    "unknown-device": Text(
        "is not in the hardware catalogue",
        ("Known: {known:or}.", "Describe any other device by a table of its memory and rates."),
    ),
    "unknown-device-similar": Text(
        "is not in the hardware catalogue",
        (
            "Did you mean {similar:or}?",
            "Known: {known:or}.",
            "Describe any other device by a table of its memory and rates.",
        ),
    ),
    "ambiguous-device": Text("matches several devices of the hardware catalogue", ("Did you mean {similar:or}?",)),
    "unknown-network": Text("unknown network {given}"),
    "unknown-link": Text("is not in the network catalogue", ("Known: {known:or}.", _OTHER_NETWORK)),
    "unknown-link-similar": Text(
        "is not in the network catalogue", ("Did you mean {similar}?", "Known: {known:or}.", _OTHER_NETWORK)
    ),
}

# Where a price per GPU hour comes from.
_PRICES = {
    "price-stated": Text("the run spec"),
    "price-unknown": Text("unknown: set cluster.price_per_gpu_hour, and cluster.spot_price_per_gpu_hour for spot"),
    "price-single": Text("the only {market} list price in the catalogue, {lowest}, {dates}"),
    "price-median": Text("median of {offers} {market} list prices, {lowest} to {highest}, {dates}"),
    "price-spot-share": Text(
        "{share:.2f} of the on-demand median {on_demand_usd:.2f}: the median ratio of the {offers} of {listed} offers "
        "that list both prices, {dates}"
    ),
    "price-live": Text("gpuhunt today, median over the providers {providers:list}"),
}

# A recorded spot market: files that cannot be used, and what a simulation assumes.
_TRACE = {
    "unusable-trace": Text("the spot trace {path} cannot be used"),
    "trace-unreadable": Text("cannot be read: {detail}", ("Give a JSON or CSV file, plain or gzipped.",)),
    "trace-without-nodes": Text(
        "no node is available at any point, so nothing can run on it", ("Use a trace with capacity.",)
    ),
    "trace-not-json": Text("is not JSON: {detail}", ("Check that the file is complete.",)),
    "several-traces": Text("holds {count} traces", ("Write one of them to a file, such as {names:list}.",)),
    "trace-without-gap": Text(
        "lacks metadata.gap_seconds, the seconds between two points", ('Add "metadata": {{"gap_seconds": 600}}.',)
    ),
    "trace-without-data": Text(
        "lacks data, the list of available nodes at each point", ("Add it, or give CSV lines seconds,nodes.",)
    ),
    "trace-line-not-numbers": Text("line {line} is not seconds,nodes", ("Write two numbers, such as 600,4.",)),
    "trace-not-ascending": Text("line {line} is not later than the line before it", ("Sort the lines by time.",)),
    "trace-too-few-points": Text("has fewer than two points", ("Write at least two lines seconds,nodes.",)),
    "trace-not-nodes": Text("{where} is not a number of nodes", ("Give whole numbers from 0.",)),
    "never-finishes-on-trace": Text("the run never finishes on {trace}"),
    "trace-intervals-too-short": Text(
        "the trace has {nodes} nodes for at most {longest:seconds} at a time, which leaves no time for a checkpoint: "
        "loading takes {restart:seconds}, and a checkpoint is due every {interval:seconds}",
        ("Lower checkpoint.every, or use fewer nodes.",),
    ),
    "trace-as-recorded": Text("as recorded"),
    "trace-of-fewer-nodes": Text(
        "the trace has at most {most}: the run has its {needed} nodes whenever all {most} are available"
    ),
    "trace-optimistic": Text(
        "{nodes} nodes are rarely all available when {most} are: expect more days than shown here"
    ),
    "trace-repeats": Text("the trace of {seconds:seconds} repeats until the run finishes"),
    "trace-with-notice": Text("each preemption is assumed to come with {grace_seconds:g} s of notice"),
    "trace-leaves-out": Text(
        "nodes that are available while others are missing cost nothing here; hardware failures are not simulated"
    ),
}

# The sizes of a run with a range of nodes.
_SIZES = {
    "size-not-faster": Text("a step takes {seconds:seconds}, no less than the {fastest:seconds} on {fewer:of node}"),
    "range-min-unusable": Text(
        "the run cannot train on so few nodes: {why}", ("Set cluster.nodes.min to {least} or more.",)
    ),
    "range-unusable": Text("the run cannot train on any number of nodes of the range; on the fewest: {why}"),
    "range-break-even": Text(
        "on {fewest:of node} the run trains at {rate:percent} of the rate of {most}: to start on fewer pays if all "
        "{most} would not be free within {seconds:seconds}"
    ),
    "range-pays": Text(
        "on {trace} the run takes {days:seconds} on what is available, and {waiting:seconds} if it waits for "
        "{nodes:of node}: the range is {factor:.2f} times as fast"
    ),
    "range-does-not-pay": Text(
        "on {trace} the run takes {days:seconds} on what is available, and {waiting:seconds} if it waits for "
        "{nodes:of node}: the range does not pay"
    ),
    "range-needed": Text(
        "on {trace} the run takes {days:seconds} on what is available, and never finishes if it waits for "
        "{nodes:of node}"
    ),
    "range-never-finishes": Text("on {trace} the run never finishes, with the range or on {nodes:of node}"),
}


TEXTS: dict[str, Text] = (
    _SEARCH_SPACE | _CHOICE | _INFEASIBLE | _CLUSTERS | _SIZING | _CATALOGUE | _PRICES | _TRACE | _SIZES
)
