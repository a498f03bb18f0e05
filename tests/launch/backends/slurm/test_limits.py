"""Limits as a real controller printed them: those that a job exceeds, and those that are in use now."""

from scaletrain_cli.launch.backends.slurm.tables import Limit, account_and_parents, fit, limits_of
from tests.launch.backends.slurm.test_tables import answer

ASSOCIATIONS = answer("assoc_mgr")


def limits(account: str = "lab", qos: str = "normal", partition_qos: str = "") -> dict[tuple[str, str], Limit]:
    found = limits_of(ASSOCIATIONS, user="root", uid=0, account=account, qos=[partition_qos, qos])
    return {(limit.owner, limit.kind): limit for limit in found}


def test_a_limit_of_an_account_is_read_with_its_usage() -> None:
    limit = limits()["account lab", "GrpTRES"]
    assert (limit.resource, limit.allowed, limit.used, limit.in_words) == ("gres/gpu", 16.0, 8.0, "GPUs")
    own = limits()["user root in account lab", "MaxJobs"]
    assert (own.resource, own.allowed, own.used) == ("jobs", 5.0, 1.0)


def test_an_account_is_known_with_those_above_it() -> None:
    assert list(account_and_parents(ASSOCIATIONS, "other")) == ["other", "lab", "root"]
    assert account_and_parents("", "other") == {"other": {}}


def test_limits_of_parent_accounts_apply() -> None:
    assert ("account lab", "GrpTRES") in limits(account="other")
    assert ("account lab", "GrpTRES") not in limits(account="root")


def test_a_limit_of_a_qos_overrides_that_of_the_account() -> None:
    found = limits(qos="capped")
    assert ("account lab", "GrpTRES") not in found
    assert (found["QOS capped", "GrpTRES"].allowed, found["QOS capped", "GrpTRES"].used) == (16.0, 8.0)
    assert (found["QOS capped", "MaxTRESPJ"].allowed, found["QOS capped", "MaxTRESPJ"].used) == (8.0, None)
    assert found["QOS capped", "MaxWallPJ"].allowed == 7200.0
    assert found["each user in QOS capped", "MaxTRESPU"].allowed == 12.0
    assert found["each user in QOS capped", "MaxJobsPU"].used == 1.0


def test_a_limit_of_a_qos_per_user_overrides_that_of_the_association() -> None:
    assert ("user root in account lab", "MaxJobs") in limits()
    assert ("user root in account lab", "MaxJobs") not in limits(qos="capped")  # it has MaxJobsPU


def test_the_limit_factor_of_a_qos_multiplies_limits_of_associations_only() -> None:
    found = limits_of(ASSOCIATIONS, user="root", uid=0, account="lab", qos=["normal"], factor=2.0)
    by_kind = {(limit.owner, limit.kind): limit.allowed for limit in found}
    assert (by_kind["account lab", "GrpTRES"], by_kind["user root in account lab", "MaxJobs"]) == (32.0, 5.0)
    own = limits_of(ASSOCIATIONS, user="root", uid=0, account="lab", qos=["capped"], factor=2.0)
    assert next(limit.allowed for limit in own if limit.owner == "QOS capped") == 16.0


def test_a_job_beyond_a_quota_is_distinguished_from_one_that_waits_for_it() -> None:
    found = tuple(limits().values())
    assert fit(found, {"gres/gpu": 8.0}, None).busy == ()
    waits = fit(found, {"gres/gpu": 16.0}, None)
    assert (waits.never, [limit.owner for limit in waits.busy]) == ((), ["account lab"])
    assert [limit.owner for limit in fit(found, {"gres/gpu": 24.0}, None).never] == ["account lab"]


def test_a_time_limit_beyond_that_of_the_qos_never_fits() -> None:
    found = tuple(limits(qos="capped").values())
    assert [limit.kind for limit in fit(found, {}, 3 * 3600.0).never] == ["MaxWallPJ"]
    assert fit(found, {}, 3600.0).never == ()


def test_a_budget_of_gpu_minutes_that_is_used_up_is_reported() -> None:
    used_up = Limit("account lab", "GrpTRESMins", "gres/gpu", 100.0, 100.0)
    left = Limit("account lab", "GrpTRESMins", "gres/gpu", 100.0, 99.0)
    assert fit([used_up, left], {"gres/gpu": 512.0}, None).busy == (used_up,)


def test_a_slurm_without_accounting_has_no_limits() -> None:
    assert limits_of("Current Association Manager state\n", user="a", uid=1, account="", qos=[""]) == ()


def test_the_qos_of_a_partition_applies_to_every_job_in_it() -> None:
    found = limits(partition_qos="capped")
    assert ("account lab", "GrpTRES") not in found
    assert found["QOS capped", "GrpTRES"].allowed == 16.0
