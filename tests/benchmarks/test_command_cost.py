import pytest
from command_cost import COMMANDS

from tests.cli.command_line import scaletrain


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith("submit")])
def test_each_dry_run_succeeds(name: str) -> None:
    arguments, _ = COMMANDS[name]
    assert scaletrain(*arguments).code == 0
