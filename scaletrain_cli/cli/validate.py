"""`scaletrain validate`: check a run spec and show the resolved settings."""

from scaletrain_cli.cli.options import AsJson, ClusterName, Overrides, SpecPath
from scaletrain_cli.errors import ExitCode, SpecError, UsageError, sentences
from scaletrain_cli.reasons import Reason
from scaletrain_cli.ui.console import warn
from scaletrain_cli.ui.json import print_json

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


def command(spec: SpecPath, overrides: Overrides = None, cluster: ClusterName = None, as_json: AsJson = False) -> None:
    """Validate a run spec and show the resolved settings. Lists all problems at once.

    Data, weights, tokenizers and other resources that submit would reject are errors, too; what is not visible on this
    machine is a warning.

    With --json: {"valid", "problems", "spec", "missing", "not_checked", "not_checked_reasons", "notes", "epochs"}; the
    spec includes every default and derived dimension.
    """
    from scaletrain_cli.launch.epochs import in_steps, provisional
    from scaletrain_cli.launch.resource_checks.checks import check_external
    from scaletrain_cli.plan.adapters import check_adapter
    from scaletrain_cli.plan.advice.warnings import about_config_keys
    from scaletrain_cli.plan.catalogue.hardware import find_accelerator
    from scaletrain_cli.plan.trained_parameters import check_what_trains
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.spec.loading import STDIN
    from scaletrain_cli.spec.problems import placed

    try:
        given = load_spec(spec, overrides or (), cluster=cluster)
        uncounted: tuple[Reason, ...] = ()
        try:
            run, epochs = in_steps(given, spec)
        except SpecError:
            raise
        except UsageError as error:  # a run may still prepare the data, and then count
            run, epochs = provisional(given), None
            uncounted = tuple(one.reason for one in error.problems if one.reason is not None)
        try:
            find_accelerator(run.cluster)
            check_adapter(run)
            check_what_trains(run)
        except UsageError as error:
            error.problems = placed(run, error.problems)
            raise
    except UsageError as error:
        if as_json:
            print_json({"valid": False, "problems": [problem.to_json() for problem in error.problems], "spec": None})
        raise
    checked, notes = check_external(run), (*about_config_keys(run), *uncounted)
    if as_json:
        details = {
            "missing": [problem.to_json() for problem in checked.problems],
            "not_checked": [sentences(warning) for warning in checked.warnings],
            "not_checked_reasons": [warning.to_document() for warning in checked.warnings],
            "notes": [note.to_json() for note in notes],
            "epochs": None if epochs is None else epochs.to_json(),
        }
        spec_document = given.model_dump(mode="json", by_alias=True)
        print_json({"valid": not checked.problems, "problems": [], "spec": spec_document} | details)
    else:
        from scaletrain_cli.ui.spec import show_summary

        shown = given if uncounted else run
        show_summary(shown, STDIN if str(spec) == "-" else str(spec), usable=not checked.problems, epochs=epochs)
        for warning in (*notes, *checked.warnings):
            warn(sentences(warning))
    if checked.problems:  # submit would reject the spec
        raise UsageError(Reason("checks.spec-unusable", {"problems": len(checked.problems)}), checked.problems)
