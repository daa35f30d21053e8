"""Where the time of a step goes, on made-up timelines: the parts add up to it, whatever overlaps."""

import random

import pytest

from llmtrain.train.report.step_profile import (
    DATA_WAIT,
    ELEMENTWISE,
    EXPOSED,
    GAPS,
    OPTIMIZER,
    Span,
    innermost,
    kind_of,
    step_profile,
    table,
)


def profiled(kernels, data=(), optimizer=(), window=(0, 1000), steps=1):
    return step_profile(
        [Span(*kernel) for kernel in kernels],
        Span("", *window),
        steps,
        [Span("", *span) for span in data],
        [Span("", *span) for span in optimizer],
    )


def nanoseconds(profile):
    return {name: round(1e9 * seconds) for name, seconds in profile.parts.items() if seconds}


def test_kernels_in_turn_and_what_is_between_them():
    found = profiled([("nvjet_tst", 100, 400), ("flash_fwd_kernel", 400, 600), ("triton_poi_fused", 700, 900)])
    assert nanoseconds(found) == {"products": 300, "attention": 200, ELEMENTWISE: 200, GAPS: 300}


def test_communication_counts_only_while_nothing_else_runs():
    found = profiled([("gemm", 0, 500), ("ncclDevKernel_AllGather", 300, 800)])
    assert nanoseconds(found) == {"products": 500, EXPOSED: 300, GAPS: 200}
    assert round(1e9 * found.hidden) == 200


def test_the_host_waits_for_a_batch_only_while_nothing_runs():
    found = profiled([("gemm", 200, 1000)], data=[(100, 500)])
    assert nanoseconds(found) == {"products": 800, DATA_WAIT: 100, GAPS: 100}


def test_kernels_of_the_optimizer_are_its_own_whatever_their_names_and_whenever_they_run():
    found = profiled([("gemm", 0, 300), ("gemm", 300, 1000)], optimizer=[(300, 1000)])
    assert nanoseconds(found) == {"products": 300, OPTIMIZER: 700}
    late = profiled([("gemm", 0, 300, 0), ("gemm", 600, 1000, 120)], optimizer=[(100, 200)])
    assert nanoseconds(late) == {"products": 300, OPTIMIZER: 400, GAPS: 300}


def test_kernels_side_by_side_count_once():
    found = profiled([("gemm", 0, 600), ("memcpy", 400, 1000)])
    assert nanoseconds(found) == {"products": 600, "copies": 400}


def test_what_is_outside_of_the_steps_does_not_count():
    found = profiled([("gemm", 0, 1000)], window=(600, 800), steps=2)
    assert found.seconds == pytest.approx(1e-7) and found.parts["products"] == pytest.approx(1e-7)


def test_the_parts_of_any_timeline_add_up_to_the_step():
    rng = random.Random(0)
    names = ["gemm", "nccl", "flash", "_chunk_scan", "memset", "reduce"]
    for _ in range(200):
        kernels = []
        for _ in range(rng.randrange(12)):
            begin = rng.randrange(-200, 1100)
            kernels.append((rng.choice(names), begin, begin + rng.randrange(1, 400)))
        waits = [(begin, begin + 50) for begin in rng.sample(range(0, 1000, 100), 3)]
        found = profiled(kernels, data=waits, optimizer=[(700, 900)])
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert all(seconds >= 0 for seconds in found.parts.values()) and found.hidden >= 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "products"),
        ("Cijk_Alik_Bljk_BBS_BH", "products"),
        ("aten::addmm", "products"),
        ("aten::mm_backward_helper", ELEMENTWISE),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("attention_dkdv", "attention"),
        ("triton_tem_fused_flex_attention_backward", "attention"),
        ("_inter_chunk_bwd", "scan"),
        ("_sequential_chunk_scan", "scan"),
        ("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>", "copies"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("triton_red_fused_add_native_layer_norm", ELEMENTWISE),
    ],
)
def test_kinds_by_name(name, kind):
    assert kind_of(name) == kind


def test_a_call_keeps_the_time_that_what_it_calls_does_not_take():
    spans = [
        Span("outer", 0, 10),
        Span("inner", 2, 5),
        Span("inmost", 3, 4),
        Span("later", 6, 10),
        Span("next", 12, 14),
    ]
    kept = [(span.name, span.start, span.end) for span in innermost(spans)]
    assert kept == [
        ("outer", 0, 2),
        ("inner", 2, 3),
        ("inmost", 3, 4),
        ("inner", 4, 5),
        ("outer", 5, 6),
        ("later", 6, 10),
        ("next", 12, 14),
    ]


def test_a_table_has_a_column_for_each_rank():
    one, other = profiled([("gemm", 0, 500)]), profiled([("gemm", 0, 900)])
    assert other.working > one.working
    header, products, *_ = table({"rank 0": one, "rank 3, slowest": other})
    assert "rank 0" in header and "rank 3, slowest" in header
    assert products.split() == ["products", "0.00", "50.0%", "0.00", "90.0%"]
