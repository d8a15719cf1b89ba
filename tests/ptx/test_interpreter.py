"""The interpreter sees what hardware would punish, and leaves alone what it would not."""

import struct

import numpy as np
import pytest

from .execute import launch
from .handwritten import kernel_of, run
from .memory import Fault, Memory
from .parse import PtxError, parse

AT_TID = "mov.u32 %r0, %tid.x; ld.param.u64 %d0, [a0]; mad.wide.u32 %d1, %r0, {size}, %d0;"


def words(n: int, value: int = 0) -> np.ndarray:
    return np.full(n, value, np.uint32)


def aligned(n: int, offset: int = 0) -> np.ndarray:
    """n bytes at a multiple of 64 plus the offset."""
    raw = np.zeros(n + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + n]


# ---- bounds and alignment


def test_every_lane_reaches_its_own_element():
    out = words(40)
    run(AT_TID.format(size=4) + "st.global.u32 [%d1], %r0; ret;", out, threads=40)
    assert out.tolist() == list(range(40))


@pytest.mark.parametrize("instruction", ["ld.global.u32 %r1, [%d1]", "st.global.u32 [%d1], %r0"])
def test_one_element_past_the_end_is_out_of_bounds(instruction):
    with pytest.raises(Fault, match="out of bounds by thread 39"):
        run(AT_TID.format(size=4) + instruction + "; ret;", words(39), threads=40)


@pytest.mark.parametrize("instruction", ["ld.global.u32 %r1, [%d1+-4]", "st.global.u32 [%d1+-4], %r0"])
def test_one_element_before_the_start_is_out_of_bounds(instruction):
    with pytest.raises(Fault, match="out of bounds by thread 0: byte -4"):
        run(AT_TID.format(size=4) + instruction + "; ret;", words(40), threads=40)


def test_a_wide_access_that_only_begins_inside_is_out_of_bounds():
    data = aligned(24)
    with pytest.raises(Fault, match="16-byte load out of bounds"):
        run(AT_TID.format(size=16) + "ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%d1]; ret;", data, threads=2)


@pytest.mark.parametrize("offset", [4, 8, 12])
@pytest.mark.parametrize(
    "instruction", ["ld.global.cs.v4.u32 {%r1,%r2,%r3,%r4}, [%d1]", "st.global.cs.v4.u32 [%d1], {%r0,%r0,%r0,%r0}"]
)
def test_a_vector_access_needs_the_alignment_of_all_its_bytes(instruction, offset):
    body = AT_TID.format(size=16) + instruction + "; ret;"
    run(body, aligned(64), threads=4)
    with pytest.raises(Fault, match="misaligned 16-byte"):
        run(body, aligned(64, offset), threads=4)


def test_a_misaligned_scalar_is_a_fault():
    with pytest.raises(Fault, match="misaligned 4-byte load by thread 0"):
        run(AT_TID.format(size=4) + "ld.global.u32 %r1, [%d1]; ret;", aligned(8, 2), threads=2)


def test_a_write_to_read_only_memory_is_a_fault():
    data = words(4)
    data.flags.writeable = False
    with pytest.raises(Fault, match="read only"):
        run(AT_TID.format(size=4) + "st.global.u32 [%d1], %r0; ret;", data, threads=4)


def test_a_parameter_does_not_lead_into_the_next():
    body = "mov.b64 %d1, a0; ld.param.u64 %d2, [%d1+8]; ret;"
    with pytest.raises(Fault, match="out of bounds"):
        run(body, words(1), words(1), threads=1)


def test_generic_addresses_reach_parameters_and_shared_memory():
    body = """
    .shared .align 4 .b8 s[4];
    mov.b64 %d1, a1; cvta.param.u64 %d2, %d1; ld.u64 %d3, [%d2];
    mov.u64 %d4, s; cvta.shared.u64 %d5, %d4; mov.u32 %r1, 7; st.u32 [%d5], %r1; ld.shared.u32 %r2, [s];
    ld.param.u64 %d0, [a0]; st.u32 [%d0], %r2;
    cvta.to.param.u64 %d7, %d2; ld.param.u64 %d8, [%d7]; st.global.u64 [%d8], %d3; ret;
    """
    out, address = words(1), np.zeros(1, np.uint64)
    run(body, out, address, threads=1)
    assert out[0] == 7 and address[0] == address.ctypes.data


# ---- races


def test_two_threads_storing_to_one_place_race():
    body = "ld.param.u64 %d0, [a0]; mov.u32 %r0, %tid.x; st.global.u32 [%d0], %r0; ret;"
    run(body, words(1), threads=1)
    with pytest.raises(Fault, match="race: two threads write"):
        run(body, words(1), threads=2)


def test_a_thread_that_reads_its_neighbours_store_races():
    body = AT_TID.format(size=4) + "st.global.u32 [%d1], %r0; ld.global.u32 %r1, [%d1+{}]; ret;"
    run(body.format(0), words(33), threads=32)
    with pytest.raises(Fault, match="race"):
        run(body.format(4), words(33), threads=32)


def test_a_thread_that_overwrites_what_its_neighbour_read_races():
    body = AT_TID.format(size=4) + "ld.global.u32 %r1, [%d1]; st.global.u32 [%d1+{}], %r1; ret;"
    run(body.format(0), words(33), threads=32)
    with pytest.raises(Fault, match="another thread read"):
        run(body.format(4), words(33), threads=32)


def test_overwriting_what_all_threads_read_races():
    body = AT_TID.format(size=4) + "ld.global.u32 %r1, [%d0]; {} st.global.u32 [%d1], %r0; ret;"
    with pytest.raises(Fault, match="another thread read"):
        run(body.format(""), words(32), threads=32)
    run(body.format("bar.sync 0;"), words(32), threads=32)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_barrier_orders_nothing_between_blocks(order):
    body = """
    ld.param.u64 %d0, [a0]; mov.u32 %r0, %ctaid.x; setp.eq.u32 %p0, %r0, 0; @%p0 bra LATE;
    st.global.u32 [%d0], %r0; ret; LATE: bar.sync 0; st.global.u32 [%d0], %r0; ret;
    """
    run(body, words(1), threads=1, grid=1)
    with pytest.raises(Fault, match="race"):
        run(body, words(1), threads=1, grid=2, order=order)


def test_what_was_read_before_a_barrier_may_be_read_and_written_after_it():
    body = (
        AT_TID.format(size=4)
        + """
    ld.global.u32 %r1, [%d0]; {} setp.eq.u32 %p0, %r0, 0; @!%p0 ret;
    ld.global.u32 %r2, [%d0]; st.global.u32 [%d0], %r2; ret;
    """
    )
    run(body.format("bar.sync 0;"), words(1))
    with pytest.raises(Fault, match="another thread read"):
        run(body.format(""), words(1))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_block_that_reads_what_another_writes_races_in_either_order(order):
    body = """
    ld.param.u64 %d0, [a0]; mov.u32 %r0, %ctaid.x; setp.eq.u32 %p0, %r0, 0;
    @%p0 ld.global.u32 %r1, [%d0]; @!%p0 st.global.u32 [%d0], %r0; ret;
    """
    with pytest.raises(Fault, match="race"):
        run(body, words(1), threads=1, grid=2, order=order)


def test_a_later_launch_is_in_order_with_an_earlier_one():
    kernel = kernel_of(
        "ld.param.u64 %d0, [a0]; ld.param.u64 %d1, [a1]; cvt.u32.u64 %r1, %d1; mov.u32 %r0, %tid.x;"
        "setp.ge.u32 %p0, %r0, %r1; @%p0 st.global.u32 [%d0], %r0; ret;",
        params=2,
    )
    memory, data = Memory(), words(1)
    base = memory.add(data, "data")
    last, both = struct.pack("<QQ", base, 1), struct.pack("<QQ", base, 0)
    launch(kernel, grid=1, block=2, params=last, memory=memory)
    launch(kernel, grid=1, block=1, params=both, memory=memory)
    with pytest.raises(Fault, match="race"):
        launch(kernel, grid=1, block=2, params=both, memory=memory)


def test_the_read_only_path_must_not_see_a_write():
    body = AT_TID.format(size=4) + "{} ret;"
    load, store = "ld.global{}.u32 %r1, [%d1];", "st.global.u32 [%d1], %r0;"
    for first, second in ((load, store), (store, load)):
        run(body.format((first + second).format("")), words(8), threads=8)
        with pytest.raises(Fault, match="race"):
            run(body.format((first + second).format(".nc")), words(8), threads=8)


# ---- shared memory and barriers

REVERSE = """
    .shared .align 4 .b8 s[128];
    mov.u32 %r0, %tid.x; mov.u64 %d1, s; mad.wide.u32 %d2, %r0, 4, %d1; st.shared.u32 [%d2], %r0;
    BARRIER
    sub.s32 %r1, 31, %r0; mad.wide.u32 %d3, %r1, 4, %d1; ld.shared.u32 %r2, [%d3];
    ld.param.u64 %d0, [a0]; mad.wide.u32 %d4, %r0, 4, %d0; st.global.u32 [%d4], %r2; ret;
"""


def test_shared_memory_carries_values_across_a_barrier():
    out = words(32)
    run(REVERSE.replace("BARRIER", "bar.sync 0;"), out)
    assert out.tolist() == list(range(31, -1, -1))


def test_a_missing_barrier_is_a_race():
    with pytest.raises(Fault, match="race"):
        run(REVERSE.replace("BARRIER", ""), words(32))


def test_shared_memory_that_nothing_wrote_is_not_read():
    with pytest.raises(Fault, match="nothing wrote"):
        run(".shared .align 4 .b8 s[4]; ld.shared.u32 %r0, [s]; ret;", threads=1)


def test_shared_memory_does_not_outlive_its_block():
    body = """
    .shared .align 4 .b8 s[4]; mov.u32 %r0, %ctaid.x; setp.ne.u32 %p0, %r0, 0;
    @!%p0 st.shared.u32 [s], %r0; @%p0 ld.shared.u32 %r1, [s]; ret;
    """
    run(body, threads=1, grid=1)
    with pytest.raises(Fault, match="nothing wrote"):
        run(body, threads=1, grid=2)


def test_running_past_a_shared_variable_does_not_meet_the_next():
    body = ".shared .align 4 .u32 s; .shared .align 4 .u32 t; mov.u32 %r0, 1; st.shared.u32 [s+4], %r0; ret;"
    with pytest.raises(Fault, match="out of bounds"):
        run(body, threads=1)


def test_threads_at_different_barriers_are_a_fault():
    body = """
    mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 16; @%p0 bra FIRST;
    bar.sync 0; bra END; FIRST: bar.sync 0; END: ret;
    """
    with pytest.raises(Fault, match="2 different barriers"):
        run(body)


def test_a_barrier_under_a_predicate_is_a_fault():
    with pytest.raises(Fault, match="under a predicate"):
        run("mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 16; @%p0 bar.sync 0; ret;")


# ---- control flow


def test_lanes_part_at_a_branch_and_meet_again():
    body = (
        AT_TID.format(size=4)
        + """
    mov.u32 %r1, 0; mov.u32 %r2, 0;
    LOOP: setp.ge.u32 %p0, %r1, %r0; @%p0 bra DONE; add.u32 %r2, %r2, %r1; add.u32 %r1, %r1, 1; bra LOOP;
    DONE: st.global.u32 [%d1], %r2; ret;
    """
    )
    out = words(50)
    counts = run(body, out, threads=50)
    assert out.tolist() == [n * (n - 1) // 2 for n in range(50)]
    assert counts["st.global.u32"] == 50
    assert counts["add.u32"] == 2 * sum(range(50))


def test_lanes_that_skip_and_lanes_that_fall_through_meet():
    out = words(32)
    body = AT_TID.format(size=4) + "setp.lt.u32 %p0, %r0, 9; @%p0 bra SKIP; add.u32 %r0, %r0, 100;"
    counts = run(body + "SKIP: st.global.u32 [%d1], %r0; ret;", out)
    assert out.tolist() == [k if k < 9 else k + 100 for k in range(32)]
    assert counts["add.u32"] == 23


def test_a_predicated_return_ends_only_its_lanes():
    out = words(32)
    run(AT_TID.format(size=4) + "setp.lt.u32 %p0, %r0, 20; @!%p0 ret; st.global.u32 [%d1], 5; ret;", out)
    assert out.tolist() == [5] * 20 + [0] * 12


def test_a_loop_without_an_end_is_a_fault(monkeypatch):
    monkeypatch.setattr(f"{__package__}.execute._STEP_LIMIT", 100)
    with pytest.raises(Fault, match="no end after 100 steps"):
        run("LOOP: bra LOOP;", threads=1)


def test_running_off_the_end_is_a_fault():
    with pytest.raises(Fault, match="past the end"):
        run("mov.u32 %r0, 1;", threads=1)


def test_a_register_is_read_only_after_it_was_written():
    with pytest.raises(Fault, match="before it is written"):
        run("add.u32 %r0, %r1, 1; ret;", threads=1)
    partly = "mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 20; @%p0 mov.u32 %r1, 3; @{}%p0 add.u32 %r2, %r1, 1; ret;"
    run(partly.format(""))
    with pytest.raises(Fault, match="before it is written"):
        run(partly.format("!"))


def test_blocks_know_who_they_are():
    body = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r1, %r2, %r0;
    ld.param.u64 %d0, [a0]; mad.wide.u32 %d1, %r3, 4, %d0; mov.u32 %r4, %nctaid.x; mad.lo.u32 %r5, %r3, 10, %r4;
    st.global.u32 [%d1], %r5; ret;
    """
    out = words(24)
    run(body, out, threads=8, grid=3, order=[2, 0, 1])
    assert out.tolist() == [10 * k + 3 for k in range(24)]


# ---- warps


def test_shuffles_move_values_within_warps():
    body = (
        AT_TID.format(size=4)
        + "shfl.sync.{}.b32 %r1|%p0, %r0, {}, {}, -1; selp.b32 %r2, %r1, 99, %p0; st.global.u32 [%d1], %r2; ret;"
    )
    for mode, by, clamp, of in (
        ("bfly", 4, 31, lambda k: k ^ 4),
        ("down", 3, 31, lambda k: k + 3 if k % 32 + 3 < 32 else 99),
        ("up", 3, 0, lambda k: k - 3 if k % 32 >= 3 else 99),
        ("idx", 7, 31, lambda k: k // 32 * 32 + 7),
    ):
        out = words(64)
        run(body.format(mode, by, clamp), out, threads=64)
        assert out.tolist() == [of(k) for k in range(64)], mode


def test_a_shuffle_with_a_lane_that_is_not_there_is_a_fault():
    body = "mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 16; @%p0 shfl.sync.bfly.b32 %r1, %r0, 1, 31, {}; ret;"
    run(body.format(0xFFFF))
    with pytest.raises(Fault, match="not here"):
        run(body.format(-1))


REDUCE = "redux.sync.max.u32 %r1, %r2, {};"
SCRAMBLED = "mul.lo.u32 %r2, %r0, 2654435761;"


def scrambled(k: int) -> int:
    return k * 2654435761 % 2**32


def test_a_reduction_gives_every_lane_the_largest_of_its_warp():
    out = words(96)
    run(AT_TID.format(size=4) + SCRAMBLED + REDUCE.format(-1) + "st.global.u32 [%d1], %r1; ret;", out, threads=96)
    assert out.tolist() == [max(scrambled(k // 32 * 32 + i) for i in range(32)) for k in range(96)]


def test_a_reduction_of_some_lanes_leaves_the_others_out():
    """The lower half of each warp returns before."""
    early = "and.b32 %r3, %r0, 16; setp.eq.u32 %p0, %r3, 0; @%p0 ret;"
    body = AT_TID.format(size=4) + SCRAMBLED + early + REDUCE + "st.global.u32 [%d1], %r1; ret;"
    out = words(64)
    run(body.format(0xFFFF0000), out, threads=64)
    largest = [max(scrambled(k // 32 * 32 + i) for i in range(16, 32)) for k in range(64)]
    assert out.tolist() == [largest[k] if k % 32 >= 16 else 0 for k in range(64)]
    with pytest.raises(Fault, match="redux names a lane that is not here"):
        run(body.format(-1), out, threads=64)


def test_a_reduction_by_a_lane_outside_its_mask_is_a_fault():
    with pytest.raises(Fault, match="redux by a lane that its mask does not name"):
        run("mov.u32 %r0, %tid.x; mov.u32 %r2, %r0;" + REDUCE.format(0xFFFF) + "ret;")


def test_reductions_at_two_places_do_not_meet():
    body = "mov.u32 %r2, %tid.x; setp.lt.u32 %p0, %r2, 8; @%p0 bra LATE;" + REDUCE + "ret; LATE:" + REDUCE + "ret;"
    with pytest.raises(Fault, match="not here"):
        run(body.format(-1, -1))
    run(body.format(0xFFFFFF00, 0xFF))


# ---- strictness


@pytest.mark.parametrize(
    "instruction",
    [
        "add.f32 %f0, %f1, %f2",  # the assembler may fuse it
        "mul.f32 %f0, %f1, %f2",
        "add.rn.ftz.f32 %f0, %f1, %f2",
        "fma.rn.ftz.f32 %f0, %f1, %f2, %f3",
        "fma.rz.f32 %f0, %f1, %f2, %f3",
        "sqrt.approx.f32 %f0, %f1",
        "div.full.f32 %f0, %f1, %f2",
        "div.approx.f32 %f0, %f1, %f2",
        "rcp.approx.ftz.f32 %f0, %f1",
        "add.sat.s32 %r0, %r1, %r2",
        "cvt.f32.f64 %f0, %g0",
        "cvt.rz.f32.f64 %f0, %g0",
        "cvt.rn.satfinite.bf16.f32 %h0, %f0",
        "cvt.rn.relu.bf16x2.f32 %r0, %f0, %f1",
        "ld.volatile.global.u32 %r0, [%d0]",
        "ld.global.v8.u32 {%r0,%r1,%r2,%r3,%r4,%r5,%r6,%r7}, [%d0]",
        "ld.shared.nc.u32 %r0, [%d0]",
        "st.param.u32 [%d0], %r0",
        "atom.global.add.u32 %r0, [%d0], 1",
        "setp.lo.s32 %p0, %r0, %r1",
        "setp.ltu.s32 %p0, %r0, %r1",
        "bar.sync 1",
        "bar.red.popc.u32 %r0, 0, %p0",
        "redux.sync.add.u32 %r0, %r1, -1",
        "redux.sync.max.s32 %r0, %r1, -1",
        "call foo",
        "frobnicate.u32 %r0, %r1",
    ],
)
def test_what_is_not_known_exactly_is_refused(instruction):
    with pytest.raises(PtxError):
        run(instruction + "; ret;", words(1), threads=1)


@pytest.mark.parametrize(
    "instruction",
    [
        "add.u32 %r0, %d1, 1",
        "add.u32 %d0, %r1, 1",
        "add.u32 %r0, %r1",
        "add.u32 %r0, %r1, 1, 2",
        "add.u32 %r0, %r1, 4294967296",
        "add.rn.f32 %f0, %f1, 0d3FF0000000000000",
        "add.rn.f32 %f0, %f1, 1.0",
        "mov.u32 %r0, %smid",
        "mov.u32 %r99, 1",
        "ld.global.v4.u32 {%r0,%r1}, [%d0]",
        "ld.global.u32 %h0, [%d0]",
        "ld.global.u32 %r0, %d0",
        "st.global.u64 [%d0], %r0",
        "mov.b64 {%r0,%h1}, %d0",
        "bra NOWHERE",
        "setp.eq.u32 %r0, %r1, %r2",
    ],
)
def test_operands_that_do_not_fit_are_refused(instruction):
    with pytest.raises(PtxError):
        run(instruction + "; ret;", words(1), threads=1)


@pytest.mark.parametrize(
    "text",
    [
        ".version 9.0\n.func foo() { ret; }",
        ".version 9.0\n.global .align 4 .b8 table[4];",
        ".version 9.0\n.extern .shared .align 16 .b8 dynamic[];",
        ".entry k() .maxclusterrank 4 { ret; }",
        ".entry k() .maxntid 16, 16, 1 { ret; }",
        ".entry k(.const .u64 p) { ret; }",
        ".entry k() { .local .align 4 .b8 depot[4]; ret; }",
        ".entry k() { .reg .v2 .f32 x; ret; }",
        ".entry k() { .reg .b32 x; { .reg .b64 x; } ret; }",
        ".entry k() { A: A: ret; }",
        ".entry k() { add.u32 a, , b; ret; }",
        ".entry k() { ret; ",
    ],
)
def test_text_that_is_not_understood_is_refused(text):
    with pytest.raises(PtxError):
        parse(text)


def test_a_launch_must_fit_the_kernel():
    kernel = parse(".entry k(.param .u64 p) .maxntid 64 { ret; }")["k"]
    launch(kernel, grid=1, block=64, params=bytes(8), memory=Memory())
    for wrong in ({"block": 65}, {"params": bytes(4)}, {"order": [1]}, {"order": [0, 0]}):
        with pytest.raises(ValueError):
            launch(kernel, **{"grid": 1, "block": 64, "params": bytes(8), "memory": Memory()} | wrong)


def test_bfloat16_conversion_needs_its_target():
    body = "mov.f32 %f0, 0f3F800000; cvt.rn.bf16.f32 %h0, %f0; ret;"
    run(body, threads=1, target=80)
    with pytest.raises(PtxError, match="compute_80"):
        run(body, threads=1, target=75)


def test_parameters_lie_as_in_the_c_structure():
    params = ".param .u32 a, .param .align 8 .b8 b[20], .param .u16 c, .param .u64 .ptr .global .align 4 d"
    kernel = parse(f".entry k({params}) {{ ret; }}")["k"]
    assert [(v.offset, v.size) for v in kernel.params.values()] == [(0, 4), (8, 20), (28, 2), (32, 8)]
    assert kernel.param_bytes == 40
