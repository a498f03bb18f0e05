"""Why layouts and clusters are not chosen, what would fit, and where prices and traces come from."""

from scaletrain_cli.reasons import Texts

_OTHER_NETWORK = "For any other network leave it out and set cluster.inter_node_bandwidth, in bytes/s per GPU."

TEXTS: Texts = {
    # Degrees and ZeRO stages that the search excludes. The texts follow the name of the axis.
    "leaves-the-node": "more ranks than the {gpus} GPUs of a node",
    "too-many-stages": "more stages than layers, or than any published run",
    "more-chunks-than-layers": "more virtual stages than layers",
    "more-ranks-than-heads": "more ranks than {heads} heads",
    "too-few-tokens": "fewer than {tokens} tokens of a sequence per rank",
    "more-ranks-than-experts": "more ranks than experts",
    "chunks-do-not-divide": "stages x virtual stages do not divide the layers",
    "more-degrees-than-tried": "more degrees than the search tries",
    "engine-lacks-axis": "this engine version supports only 1",
    "framework-lacks-axis": "{framework} supports only 1",
    "zero-with-pipeline": "zero_stage above 1: {framework} does not support it with a pipeline",
    "no-zero-0": "zero_stage 0: {framework} does not support it with {precision}",
    "no-zero-3": "zero_stage 3: {precision} matrix products keep the weights that it gathers",
    # Why a layout was not chosen: for one layout with its numbers, and "counted-" for many layouts.
    "needs-memory": "does not fit: needs {peak:bytes} of {capacity:bytes}",
    "does-not-fit": "does not fit",
    "never-fits": "does not fit with any micro-batch",
    "little-memory-left": "leaves little memory free: takes {share:percent} of the device",
    "counted-little-memory-left": "leaves little memory free",
    "fewer-negatives": "gradient accumulation reduces in-batch negatives",
    "slower": "{ratio:.2f} times as slow",
    "counted-slower": "slower",
    "riskier": "{probability:percent} likely to run out of memory",
    "may-stall": "{probability:percent} likely to stall between nodes, and then {ratio:.3g} times as slow",
    "counted-may-stall": "likely to stall between nodes",
    "counted-riskier": "more likely to run out of memory",
    "faster-within-error": "{gain:percent} faster, within the error of the model, and more complex",
    "counted-faster-within-error": "faster by less than the error of the model, and more complex",
    "not-faster": "not faster, and more complex",
    "offloads-needlessly": "uses offload, although it fits without",
    "cannot-be-faster": "cannot be faster, by a lower bound on the step time",
    "search-ended": "not evaluated: the search ends after {layouts} layouts, lowest bounds first",
    # A run that fits no layout, and the changes that would make it fit.
    "needed-memory": "{parts} = {peak:bytes}; {device} has {capacity:bytes}",
    "smallest-layout": "{layout}",
    "would-fit": "needs {peak:bytes} of {capacity:bytes} and {step:seconds} per step ({layout})",
    "with-settings-freed": "{cause}, with {keys:list} on auto",
    "no-layout-divides": "no layout of {name} divides over {gpus}",
    "run-does-not-fit": "{name} does not fit on {gpus}: the smallest layout needs {peak:bytes} per rank and a rank "
    "has {capacity:bytes}",
    "none-feasible": "none of the {runs} runs fits; `scaletrain plan` of one run shows every change that would make "
    "it fit",
    "nothing-fits": ("more or larger GPUs do not make it fit", "Use a smaller model or a shorter seq_len."),
    # Why a cluster was not chosen, and the time and cost of one that meets the limits.
    "cluster-does-not-fit": "does not fit: {what}",
    "cluster-does-not-divide": "does not divide: {what}",
    "no-progress": "interruptions leave no progress",
    "no-price": "no price is known: set cluster.price_per_gpu_hour",
    "too-late": "{by:seconds} too late",
    "over-budget": "{by:usd} over budget",
    "more-gpus": "more GPUs than needed",
    "slower-on-as-many": "slower with the same number of GPUs",
    "slower-by": "{by:seconds} slower",
    "costs-more": "costs {by:usd} more",
    "no-cheaper": "no cheaper, and slower",
    "at-least": "{cause}, at least",
    "cluster-cannot-win": "none of its layouts is better, each by a bound of its own, which is higher",
    "closest-cluster": "{takes}; {missed}",
    "sufficient-cluster": "{takes}",
    "scheduler-is-one-node": "cluster.scheduler = {scheduler} has only one node: use slurm to consider more",
    "one-node-limit": ("has only one node", "Use slurm for more nodes."),
    "more-than-the-spec": "more than the {gpus} GPUs of the spec; to submit it, use --set cluster.nodes={nodes}",
    # No cluster within the limits, and limits that cannot be used.
    "no-cluster-fits": "the run fits on no cluster of at most {max_gpus:whole} GPUs",
    "no-cluster-meets-limits": "no cluster of at most {max_gpus:whole} GPUs meets {limits}; the closest one: {missed}",
    "larger-cluster-suffices": "{cause}; {gpus:whole} x {gpu} would do",
    "needs-price": ("an objective of cost, or a budget, needs a price", "Set cluster.price_per_gpu_hour."),
    "less-than-one-node": (
        "at most {max_gpus} GPUs are less than the {least} of {nodes:of node}",
        "Use --max-gpus {least} or more, or fewer cluster.gpus_per_node or cluster.spare_nodes.",
    ),
    "unknown-objective": ("unknown objective {given}", "Use {allowed:or}."),
    "invalid-limit": "{option} is invalid",
    "limit-not-parsed": "{detail}",
    "limit-not-positive": "must be above 0",
    # Names that the catalogues lack.
    "unknown-accelerator": "unknown accelerator {given}",
    "unknown-device": (
        "is not in the hardware catalogue",
        "Known: {known:or}.",
        "Describe any other device by a table of its memory and rates.",
    ),
    "unknown-device-similar": (
        "is not in the hardware catalogue",
        "Did you mean {similar:or}?",
        "Known: {known:or}.",
        "Describe any other device by a table of its memory and rates.",
    ),
    "ambiguous-device": ("matches several devices of the hardware catalogue", "Did you mean {similar:or}?"),
    "unknown-network": "unknown network {given}",
    "unknown-link": ("is not in the network catalogue", "Known: {known:or}.", _OTHER_NETWORK),
    "unknown-link-similar": (
        "is not in the network catalogue",
        "Did you mean {similar}?",
        "Known: {known:or}.",
        _OTHER_NETWORK,
    ),
    # Where a price per GPU hour comes from.
    "price-stated": "the run spec",
    "price-unknown": "unknown: set cluster.price_per_gpu_hour, and cluster.spot_price_per_gpu_hour for spot",
    "price-single": "the only {market} list price in the catalogue, {lowest}, {dates}",
    "price-median": "median of {offers} {market} list prices, {lowest} to {highest}, {dates}",
    "price-spot-share": "{share:.2f} of the on-demand median {on_demand_usd:.2f}: the median ratio of the {offers} of "
    "{listed} offers that list both prices, {dates}",
    "price-live": "gpuhunt today, median over the providers {providers:list}",
    # A recorded spot market: files that cannot be used, and what a simulation assumes.
    "unusable-trace": "the spot trace {path} cannot be used",
    "trace-unreadable": ("cannot be read: {detail}", "Give a JSON or CSV file, plain or gzipped."),
    "trace-without-nodes": (
        "no node is available at any point, so nothing can run on it",
        "Use a trace with capacity.",
    ),
    "trace-not-json": ("is not JSON: {detail}", "Check that the file is complete."),
    "several-traces": ("holds {count} traces", "Write one of them to a file, such as {names:list}."),
    "trace-without-gap": (
        "lacks metadata.gap_seconds, the seconds between two points",
        'Add "metadata": {{"gap_seconds": 600}}.',
    ),
    "trace-without-data": (
        "lacks data, the list of available nodes at each point",
        "Add it, or give CSV lines seconds,nodes.",
    ),
    "trace-line-not-numbers": ("line {line} is not seconds,nodes", "Write two numbers, such as 600,4."),
    "trace-not-ascending": ("line {line} is not later than the line before it", "Sort the lines by time."),
    "trace-too-few-points": ("has fewer than two points", "Write at least two lines seconds,nodes."),
    "trace-not-nodes": ("{where} is not a number of nodes", "Give whole numbers from 0."),
    "never-finishes-on-trace": "the run never finishes on {trace}",
    "trace-intervals-too-short": (
        "the trace has {nodes} nodes for at most {longest:seconds} at a time, which leaves no time for a checkpoint: "
        "loading takes {restart:seconds}, and a checkpoint is due every {interval:seconds}",
        "Lower checkpoint.every, or use fewer nodes.",
    ),
    "trace-as-recorded": "as recorded",
    "trace-of-fewer-nodes": "the trace has at most {most}: the run has its {needed} nodes whenever all {most} are "
    "available",
    "trace-optimistic": "{nodes} nodes are rarely all available when {most} are: expect more days than shown here",
    "trace-repeats": "the trace of {seconds:seconds} repeats until the run finishes",
    "trace-with-notice": "each preemption is assumed to come with {grace_seconds:g} s of notice",
    "trace-leaves-out": "nodes that are available while others are missing cost nothing here; hardware failures are "
    "not simulated",
    # The sizes of a run with a range of nodes.
    "size-not-faster": "a step takes {seconds:seconds}, no less than the {fastest:seconds} on {fewer:of node}",
    "range-min-unusable": ("the run cannot train on so few nodes: {why}", "Set cluster.nodes.min to {least} or more."),
    "range-unusable": "the run cannot train on any number of nodes of the range; on the fewest: {why}",
    "range-break-even": "on {fewest:of node} the run trains at {rate:percent} of the rate of {most}: to start on "
    "fewer pays if all {most} would not be free within {seconds:seconds}",
    "range-pays": "on {trace} the run takes {days:seconds} on what is available, and {waiting:seconds} if it waits "
    "for {nodes:of node}: the range is {factor:.2f} times as fast",
    "range-does-not-pay": "on {trace} the run takes {days:seconds} on what is available, and {waiting:seconds} if it "
    "waits for {nodes:of node}: the range does not pay",
    "range-needed": "on {trace} the run takes {days:seconds} on what is available, and never finishes if it waits for "
    "{nodes:of node}",
    "range-never-finishes": "on {trace} the run never finishes, with the range or on {nodes:of node}",
}
