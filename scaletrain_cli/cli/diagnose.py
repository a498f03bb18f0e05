"""`scaletrain diagnose`: what is wrong with the training of a run, with evidence, causes and changes of the spec."""

from scaletrain_cli.cli.options import AsJson, RunOrNewest
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.paths import find_run_or_newest
from scaletrain_cli.ui.json import print_json

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


def command(run: RunOrNewest = None, as_json: AsJson = False) -> None:
    """Diagnose how a run trains: its loss, learning rate, gradients, data, speed, memory and checkpoints.

    Reads the run directory only, while the run trains or after its end. Each finding has its evidence, its likely
    causes and the line of the spec to change. `scaletrain explain` tells why a run waits or has ended.
    """
    from scaletrain_cli.diagnosis.checks import diagnose_run
    from scaletrain_cli.rundir.record import read_record

    run_dir = find_run_or_newest(run)
    diagnosis = diagnose_run(run_dir, read_record(run_dir))
    if as_json:
        print_json(diagnosis.to_json())
        return
    from scaletrain_cli.launch.replan import may_change
    from scaletrain_cli.ui.diagnosis import show_diagnosis

    show_diagnosis(diagnosis, may_change)
