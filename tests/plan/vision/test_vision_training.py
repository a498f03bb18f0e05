from typing import Any

import pytest

from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.advice.explain import explain
from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import rank_cores
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.engine_support import unsupported
from scaletrain_cli.plan.search.layouts import build_layout, micro_batch_sizes
from scaletrain_cli.plan.trained_parameters import stage_at, trained_at
from scaletrain_cli.plan.vision.image_feed import allowed_workers, core_seconds, image_feed, reader_bytes
from scaletrain_cli.plan.vision.states import trained_network
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.images import AugmentSpec, ImagesSpec
from scaletrain_cli.spec.run_consistency import run_inconsistencies
from tests.plan.vision.test_vision_plan import sized, spec_of, whole
from tests.plan.vision.test_vision_size import model_of

HEAD = [{"match": ["classifier.*"]}]
TEXT_TOWER = [{"match": ["text_*", "logit_scale"]}]
TWO_STAGES = [{"match": ["multi_modal_projector.*"], "lr": 1e-3}, {"match": ["language_model.*"], "start_step": 101}]


def codes(plan: RunPlan) -> set[str]:
    return {reason.code for reason in plan.warnings}


def with_images(spec: RunSpec, **augment: Any) -> RunSpec:
    images = ImagesSpec(augment=AugmentSpec.model_validate(augment))
    return spec.model_copy(update={"data": spec.data.model_copy(update={"images": images})})


def test_blocks_below_all_that_train_save_nothing_and_have_no_backward_pass() -> None:
    plain, head = spec_of("vit-base-patch16"), spec_of("vit-base-patch16", training__trainable=HEAD)
    (whole_memory, whole_time), (memory, time) = (sized(spec, 64) for spec in (plain, head))
    assert memory.activations < 0.05 * whole_memory.activations
    assert time.compute == pytest.approx(whole_time.compute / 3, rel=0.15)
    model: Any = head.model
    network = trained_network(whole("vit-base-patch16"), model, trained_at(head, 1))
    assert {block.training for block in network.blocks} == {"frozen", "trained"}
    assert network.training_flops == pytest.approx(2 * network.macs, rel=1e-3)


def test_a_frozen_tower_of_clip_costs_its_forward_pass_alone() -> None:
    spec = spec_of("clip-vit-base-patch32", training__trainable=TEXT_TOWER)
    model: Any = spec.model
    network = trained_network(whole("clip-vit-base-patch32"), model, trained_at(spec, 1))
    image = [block for block in network.blocks if block.tower == "image"]
    assert {block.training for block in image} == {"frozen"}
    assert {block.training for block in network.blocks if block.tower == "text"} == {"trained"}
    saved = network.macs * 6 - network.training_flops
    assert saved == 4 * sum(block.macs * block.count for block in image)


def test_gradients_pass_through_frozen_blocks_above_one_that_trains() -> None:
    lowest = [{"match": ["vit.encoder.layer.0.*", "classifier.*"]}]
    plain, low = spec_of("vit-base-patch16"), spec_of("vit-base-patch16", training__trainable=lowest)
    (whole_memory, whole_time), (memory, time) = (sized(spec, 64) for spec in (plain, low))
    assert 0.4 < memory.activations / whole_memory.activations < 0.9
    assert 0.55 < time.compute / whole_time.compute < 0.85


def test_a_spec_of_images_may_set_what_trains_in_which_steps_and_rates_by_layer() -> None:
    spec = spec_of("vit-base-patch16", training__trainable=HEAD, training__optimizer={"layer_decay": 0.75})
    assert not [key for key, _ in run_inconsistencies(spec) if key.startswith("training")]
    late = spec_of("vit-base-patch16", training__trainable=[{**HEAD[0], "start_step": 1001}])
    assert "training.trainable.0.start_step" in dict(run_inconsistencies(late))
    rates = {settings.lr_factor for settings in stage_at(spec, 1).phases[0].settings.values()}
    assert rates == {1.0}
    whole_model = spec_of("vit-base-patch16", training__optimizer={"layer_decay": 0.75})
    by_name = stage_at(whole_model, 1).phases[0].settings
    assert by_name["vit.encoder.layer.11.output.dense.weight"].lr_factor == pytest.approx(0.75)
    assert by_name["vit.embeddings.cls_token"].lr_factor == pytest.approx(0.75**13)
    assert by_name["vit.embeddings.position_embeddings"].weight_decay == 0


def test_a_run_in_stages_is_planned_for_the_fullest_and_with_mean_times() -> None:
    stages = [*HEAD, {"match": ["vit.*"], "start_step": 251}]
    plan = make_plan(spec_of("vit-base-patch16", training__trainable=stages))
    first, second = plan.training_stages
    assert (first.last_step, second.first_step) == (250, 251)
    assert plan.memory.peak == max(first.peak, second.peak)
    assert plan.time.step == pytest.approx(0.25 * first.step_seconds + 0.75 * second.step_seconds)
    assert plan.model.trainable_parameters == plan.model.parameters


def test_llava_in_two_stages_trains_its_projector_and_then_its_language_model_too() -> None:
    model = model_of("llava-1.5-7b").model_dump()
    model["text_config"]["seq_len"] = 2048
    raw: dict[str, Any] = {"training__global_batch_size": 128, "training__micro_batch_size": 4}
    spec = spec_of(**raw, training__trainable=TWO_STAGES)
    spec = spec.model_copy(update={"model": type(model_of("llava-1.5-7b")).model_validate(model)})
    plan = make_plan(spec)
    first, second = plan.training_stages
    assert first.trainable_parameters == 4096 * 1024 + 4096 + 4096**2 + 4096
    assert second.trainable_parameters == first.trainable_parameters + 6_738_939_904
    assert plan.memory.fits
    assert first.peak < second.peak
    # The backward pass through a frozen language model computes one of two gradients.
    assert 0.6 < first.step_seconds / second.step_seconds < 0.8
    text = model_of("llava-1.5-7b").text_config.model_copy(update={"seq_len": 2048})
    alone = workload_of(text).size(text)
    assert plan.model.parameters - alone.parameters == 303_507_456 + first.trainable_parameters  # the image tower
    assert plan.model.flops_per_token > 0.9 * 2048 * alone.flops_per_token


def test_a_contrastive_batch_in_parts_repeats_each_forward_pass() -> None:
    spec = spec_of("clip-vit-base-patch32", training__global_batch_size=8192)
    (_, whole_step), (_, parts) = sized(spec, 1024), sized(spec, 256)
    assert parts.recompute > 0 == whole_step.recompute
    assert parts.compute == pytest.approx(whole_step.compute * 4 / 3, rel=0.1)
    assert parts.hfu / parts.mfu == pytest.approx(4 / 3)


def test_small_batches_of_batch_norm_are_warned_of() -> None:
    def warned(**training: Any) -> set[str]:
        changes = {f"training__{key}": value for key, value in training.items()}
        return codes(make_plan(spec_of("resnet-50", **changes)))

    few = {"plan.few-images-per-rank", "plan.few-images-of-all-ranks"}
    alone = warned(global_batch_size=64, micro_batch_size=8, sync_batch_norm=False)
    assert alone & few == {"plan.few-images-per-rank"}
    assert not warned(global_batch_size=64, micro_batch_size=8, sync_batch_norm=True) & few
    assert "plan.accumulates-with-batch-norm" in warned(global_batch_size=512, micro_batch_size=32)
    assert not warned(global_batch_size=512, micro_batch_size=64) & {*few, "plan.accumulates-with-batch-norm"}
    assert not codes(make_plan(spec_of("vit-base-patch16", training__micro_batch_size=8))) & few


def test_synchronized_statistics_take_time_between_ranks() -> None:
    apart, together = (sized(spec_of(training__sync_batch_norm=flag), 8)[1] for flag in (False, True))
    assert together.exposed_communication > apart.exposed_communication
    assert together.compute == apart.compute
    # Layers that do not train normalize by their running statistics, which no rank has to send.
    head = {"training__trainable": HEAD}
    apart, together = (sized(spec_of(training__sync_batch_norm=flag, **head), 8)[1] for flag in (False, True))
    assert together.exposed_communication == apart.exposed_communication


def test_mixed_images_need_an_even_micro_batch() -> None:
    spec = with_images(spec_of("vit-base-patch16"), mixup=0.8)
    axes = resolve_axes(spec)
    assert all(size % 2 == 0 for size in micro_batch_sizes(spec, axes))
    rules = {rule.code for rule in unsupported(spec, build_layout(spec, axes, 1, "none", 1))}
    assert "engine-mixed-pairs" in rules
    assert "engine-mixed-pairs" not in {r.code for r in unsupported(spec, build_layout(spec, axes, 1, "none", 2))}


def test_few_workers_are_a_cause_of_step_time_that_enough_of_them_remove() -> None:
    few = make_plan(spec_of(data__loader={"workers": 1}))
    assert few.time.data_wait > few.time.compute
    assert few.time.step == pytest.approx(
        few.time.compute + few.time.exposed_communication + few.time.optimizer + few.time.data_wait
    )
    (reason,) = [reason for reason in few.warnings if reason.code == "plan.too-few-image-workers"]
    enough = make_plan(spec_of(data__loader={"workers": reason.params["needed"]}))
    assert enough.time.data_wait == 0
    assert enough.layout == few.layout
    assert "plan.too-few-image-workers" not in codes(enough)
    assert enough.time.samples_per_second > 2 * few.time.samples_per_second
    (loader,) = [
        question for question in explain(spec_of(data__loader={"workers": 1}), few) if question.key == "loader"
    ]
    assert loader.answer is False
    assert str(reason.params["needed"]) in loader.verdict_text


def test_images_per_second_of_ranks_and_nodes_follow_from_the_step() -> None:
    spec = spec_of("resnet-50", cluster__nodes=2)
    layout = build_layout(spec, resolve_axes(spec), 1, "none", 32)
    feed = image_feed(spec, layout, step=0.1)
    assert feed.rank_rate == pytest.approx(512 / 16 / 0.1)
    assert feed.node_rate == pytest.approx(8 * feed.rank_rate)
    assert feed.read_rate == pytest.approx(110_000 * feed.node_rate)
    assert feed.cores >= feed.node_rate * core_seconds(spec)
    assert 250 <= 1 / core_seconds(spec) <= 400  # crop and flip at 224 x 224
    assert feed.core_rate == pytest.approx(0.5 / core_seconds(spec))  # beside other cores that decode


def test_larger_images_and_more_operations_take_more_of_a_core() -> None:
    plain = spec_of("vit-base-patch16")
    large = plain.model_copy(update={"model": model_of("vit-base-patch16", image_size=384)})
    augmented = with_images(plain, rand_augment={})
    assert core_seconds(large) > core_seconds(plain)
    assert core_seconds(augmented) > core_seconds(plain)


def test_images_for_small_networks_are_taken_to_be_small_files() -> None:
    small, usual = (
        spec_of("vit-base-patch16").model_copy(update={"model": model_of("vit-base-patch16", image_size=side)})
        for side in (32, 112)
    )
    assert 5_000 < 1 / core_seconds(small) < 9_000  # 7,000 of recipes/clip_pairs_cpu.py
    assert core_seconds(usual) > 10 * core_seconds(small)
    layout = build_layout(usual, resolve_axes(usual), 1, "none", 32)
    feeds = [image_feed(spec, layout, step=0.1) for spec in (small, usual)]
    assert feeds[0].read_rate == pytest.approx(feeds[1].read_rate * 32**2 / (500 * 375))


def test_slow_storage_and_few_cores_limit_the_images_of_a_step() -> None:
    slow = make_plan(spec_of(cluster__storage_bandwidth="100MB/s"))
    assert "plan.images-exceed-storage" in codes(slow)
    assert slow.time.samples_per_second == pytest.approx(100e6 / 110_000, rel=0.01)
    few = make_plan(spec_of(cluster__cpus_per_gpu=2))
    assert "plan.too-few-cores-for-images" in codes(few)
    assert few.time.data_wait > 0


def test_a_step_is_as_long_as_the_slower_of_gpu_and_data_path_in_every_framework() -> None:
    for changes in ({}, {"planner__framework": "fsdp"}):
        spec = spec_of(**{"data__loader": {"workers": 2}, "cluster__cpus_per_gpu": 6, **changes})
        plan = make_plan(spec)
        time, layout = plan.time, plan.layout
        images = layout.global_batch_size / layout.data_parallel
        # two processes that decode at the same time, each at half of the rate of one alone
        assert time.step == pytest.approx(images * core_seconds(spec))
        assert time.step == time.compute + time.exposed_communication + time.optimizer + time.data_wait
    for changes in ({"data__source": "sklearn-digits"}, {"code__command": ["python", "train.py"]}):
        assert make_plan(spec_of(**{"data__loader": {"workers": 0}, **changes})).time.data_wait == 0


def test_a_job_that_requests_fewer_cores_than_the_images_need_is_a_warning_though_the_plan_does_not_wait() -> None:
    run = {"data__loader": {}, "cluster__gpu": "a100-sxm-80gb"}
    plan = make_plan(spec_of("clip-vit-base-patch32", **run))
    assert plan.time.data_wait == 0
    (reason,) = [reason for reason in plan.warnings if reason.code == "plan.job-requests-few-cores"]
    assert reason.params["requested"] == 4 < reason.params["needed"] <= reason.params["cores"] == 16
    enough = make_plan(spec_of("clip-vit-base-patch32", cluster__cpus_per_gpu=reason.params["needed"], **run))
    assert "plan.job-requests-few-cores" not in codes(enough)
    slice_of_a_gpu = spec_of(
        cluster__gpu="h100-sxm-80gb", cluster__slurm={"gres_type": "h100_1g.10gb"}, data__loader={}
    )
    assert rank_cores(slice_of_a_gpu) == 4, "what the job requests"


def test_published_runs_of_clip_that_decode_images_are_within_the_range_of_a_plan() -> None:
    """LAION's table (arXiv:2212.07143): equal runs differ by a factor of two, and none is faster than planned."""
    decoded = make_plan(spec_of("clip-vit-base-patch32", data__loader={"workers": 15}))
    digits = make_plan(spec_of("clip-vit-base-patch32", data__source="sklearn-digits"))
    assert decoded.ranges.time.measured_regime == "decoded images"
    assert digits.ranges.time.measured_regime == "images"
    # Rates with files to decode were published for CLIP alone.
    for other in ("llava-tiny", "vit-base-patch16"):
        assert make_plan(spec_of(other, training__global_batch_size=16)).ranges.time.regime == "images"
    assert decoded.ranges.step_seconds is not None
    assert decoded.ranges.step_seconds.p90 > 2 * decoded.time.step


def test_advice_about_text_is_not_given_for_images() -> None:
    for preset in ("resnet-50", "clip-vit-base-patch32"):
        plan = make_plan(spec_of(preset))
        topics = {check.topic for check in plan.sanity}
        assert not topics & {"tokens per parameter", "critical batch size", "validation split"}
        text = " ".join(map(str, [*plan.warnings, *plan.assumptions, *(check.message for check in plan.sanity)]))
        assert "perplexity" not in text
        assert "tokens per parameter" not in text


def test_fine_tuned_language_models_are_no_measure_of_weights_of_images() -> None:
    spec = spec_of("vit-base-patch16", training__optimizer={"lr": 1e-3})
    tuned = spec.model_copy(update={"model": spec.model.model_copy(update={"weights": "/models/vit"})})
    assert not {check.topic for check in make_plan(tuned).sanity} & {"learning rate", "weight decay"}


def test_settings_of_the_language_model_that_the_engine_does_not_have_are_named() -> None:
    spec: Any = spec_of("llava-tiny", training__global_batch_size=16)
    layout = build_layout(spec, resolve_axes(spec), 1, "none", 1)
    assert unsupported(spec, layout) == []
    text = spec.model.text_config.model_copy(update={"embedding_norm": True})
    (rule,) = unsupported(
        spec.model_copy(update={"model": spec.model.model_copy(update={"text_config": text})}), layout
    )
    assert rule.key == "model.text_config.embedding_norm"
    assert rule.message
    assert not rule.message.startswith("plan.")


def test_the_memory_of_each_layout_has_exact_states() -> None:
    spec = spec_of("resnet-50", training__precision="fp32", training__grad_dtype="fp32")
    memory, _ = sized(spec, 8, 0)
    statistics = 2 * 4 * 26_560 + 8 * 53
    assert memory.parameters == 4 * 25_557_032 + statistics
    assert memory.optimizer_states == 8 * 25_557_032


def test_workers_are_advised_up_to_the_limit_of_the_spec_and_the_cores_of_a_rank() -> None:
    few = make_plan(spec_of(cluster__cpus_per_gpu=2, data__loader={"workers": 1}))
    (reason,) = [reason for reason in few.warnings if reason.code == "plan.too-few-image-workers"]
    assert reason.params["needed"] == 2
    enough = make_plan(spec_of(cluster__cpus_per_gpu=2, data__loader={"workers": 2}))
    assert "plan.too-few-image-workers" not in codes(enough)
    assert "plan.too-few-cores-for-images" in codes(enough)
    many = spec_of(cluster__cpus_per_gpu=100, data__loader={"workers": 64})
    heavy = with_images(many, rand_augment={"num_ops": 16, "probability": 1})
    slow = heavy.model_copy(update={"model": heavy.model.model_copy(update={"image_size": 1024})})
    feed = image_feed(slow, make_plan(heavy).layout, step=0.1)
    assert feed.workers > 64
    assert allowed_workers(slow, feed) == 64


def test_automatic_workers_are_the_cores_of_the_usual_server_and_the_plan_says_how_many_are_enough() -> None:
    spec = spec_of(data__loader={}, cluster__gpu="v100-sxm2-32gb", training__precision="fp16")
    few = make_plan(spec)
    assert few.time.data_wait > 0
    (reason,) = [reason for reason in few.warnings if reason.code == "plan.images-need-cores"]
    assert reason.params["cores"] == rank_cores(spec) == 5  # a DGX-1 has 40 for its eight GPUs
    assert "plan.too-few-image-workers" not in codes(few)
    (readers,) = [each for each in few.assumptions if each.code == "plan.assumes-image-readers"]
    assert readers.params == {"workers": 4, "cores": 5}
    (loader,) = [question for question in explain(spec, few) if question.key == "loader"]
    assert loader.answer is False

    def with_cores(cores: int) -> RunPlan:
        cluster = spec.cluster.model_copy(update={"cpus_per_gpu": cores})
        return make_plan(spec.model_copy(update={"cluster": cluster}))

    enough = with_cores(reason.params["needed"])
    assert enough.time.data_wait == 0
    assert not codes(enough) & {"plan.images-need-cores", "plan.too-few-cores-for-images"}
    assert "plan.too-few-cores-for-images" in codes(with_cores(reason.params["needed"] - 1))


def test_pods_have_memory_for_the_processes_that_read() -> None:
    spec = spec_of(data__loader={"workers": 10})
    layout = build_layout(spec, resolve_axes(spec), 1, "none", 32)
    assert reader_bytes(spec, layout) == 10 * (256 * 2**20 + 3 * 64 * 224 * 224 * 3)
    assert reader_bytes(spec_of(data__loader={}), layout) == 1.5 * reader_bytes(spec, layout)
    assert reader_bytes(spec_of(data__loader={}, cluster__cpus_per_gpu=6), layout) == 0.5 * reader_bytes(spec, layout)
    assert reader_bytes(spec_of(data__loader={"workers": 0}), layout) == 0
