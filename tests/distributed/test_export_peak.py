"""The extra device memory of an export and of a load is one staging budget, on 64 ranks of a fake CUDA world."""

from __future__ import annotations

import pytest
import torch
from statestream.checkpoint import transfer
from statestream.state import stored
from torch.distributed.tensor import Replicate, Shard

from benchmarks.simulated.export_peak import BOUNDED, Peak, Shape, build, local_elements, peaks
from benchmarks.simulated.fake_cuda import fake_cuda_world
from benchmarks.simulated.live_bytes import LiveBytes

STAGING = 1 << 19

# Elements of the largest local parameter, and how many there are: the whole state varies 16 times over at one
# largest parameter, and the largest parameter 16 times over at one size of the whole.
POINTS = [(1 << 16, 1), (1 << 16, 16), (1 << 20, 1)]


def dense(mesh, elements: int, count: int) -> list[Shape]:
    return [Shape((elements // 1024, 1024), mesh, (Shard(0),))] * count


def mixture_of_experts(mesh) -> list[Shape]:
    """Two layers with 256 experts of hidden size 7168, on an 8 x 8 mesh: experts over `ep`, each cut over `dp`."""
    experts = (Shard(1), Shard(0))
    expert_layer = [Shape((32, 256, 7168), mesh, experts)] * 2 + [Shape((32, 896, 2048), mesh, experts)]
    shared = [Shape((896, 2048), mesh["dp"], (Shard(0),)), Shape((7168,), mesh, (Replicate(), Replicate()))]
    return [*expert_layer, *shared] * 2


def assert_bounded(found: dict[str, Peak], staging_bytes: int) -> None:
    over = {path: peak for path, peak in found.items() if peak.extra > staging_bytes or peak.kept > 0}
    assert not over, f"extra device bytes beyond the staging budget of {staging_bytes}: {over}"


@pytest.fixture(scope="module")
def measured() -> dict[tuple[int, int], tuple[int, dict[str, Peak], dict[str, Peak]]]:
    """For each point: local elements, peaks with the option on, peaks with it off."""
    found = {}
    with fake_cuda_world() as mesh:
        for point in POINTS:
            shapes = dense(mesh, *point)
            on, off = peaks(shapes, STAGING), peaks(shapes, STAGING, offload=False)
            found[point] = (local_elements(shapes), on, off)
    return found


@pytest.mark.parametrize("point", POINTS)
def test_extra_device_bytes_are_at_most_one_staging_budget(measured, point):
    _, on, _ = measured[point]
    assert set(on) == set(BOUNDED)
    assert_bounded(on, STAGING)


def test_extra_device_bytes_depend_neither_on_the_state_nor_on_the_largest_parameter(measured):
    sizes = {elements for elements, _, _ in measured.values()}
    assert max(sizes) >= 16 * min(sizes)
    for path in BOUNDED:
        assert {on[path].extra for _, on, _ in measured.values()} == {STAGING}, path


@pytest.mark.parametrize("point", POINTS)
def test_the_usual_export_takes_8_bytes_an_element(measured, point):
    elements, _, off = measured[point]
    for path in BOUNDED:
        if not path.startswith("set"):
            assert off[path].extra == 8 * elements, path


def test_large_mixture_of_experts_exports_within_the_staging_budget():
    staging = 64 << 20
    with fake_cuda_world((8, 8), ("dp", "ep")) as mesh:
        shapes = mixture_of_experts(mesh)
        assert max(shape.elements for shape in shapes) * 4 > 3 * staging
        assert_bounded(peaks(shapes, staging, paths=["state_dict", "get, flat, cpu_offload", "set, flat"]), staging)


@pytest.mark.parametrize("masters", [pytest.param("fp32", marks=pytest.mark.long), "fp16"])
def test_states_in_blocks_with_scales_take_no_more(masters):
    with fake_cuda_world() as mesh:
        shapes = dense(mesh, 1 << 20, 1)
        formats = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "master_weight_dtype": masters}
        assert_bounded(peaks(shapes, STAGING, **formats), STAGING)


@pytest.mark.parametrize("masters", [pytest.param("fp32", marks=pytest.mark.long), "fp16"])
def test_masters_of_weights_that_were_written_take_no_more(masters, monkeypatch):
    """What a step would make of them is made in host memory; a control sees it made on the device."""
    decode = stored.Stored._decode_refreshed
    seen = []

    def noted(self, out, first):
        seen.append(out.device.type)
        decode(self, out, first)

    def through_the_device(self, out, first):
        whole = torch.empty(self.local.shape, dtype=torch.float32, device=self.local.device)
        decode(self, out, first)
        del whole

    with fake_cuda_world() as mesh:
        shapes = dense(mesh, 1 << 20, 1)
        formats = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "master_weight_dtype": masters, "written": True}
        monkeypatch.setattr(stored.Stored, "_decode_refreshed", noted)
        assert_bounded(peaks(shapes, STAGING, **formats), STAGING)
        assert set(seen) == {"cpu"}
        monkeypatch.setattr(stored.Stored, "_decode_refreshed", through_the_device)
        with pytest.raises(AssertionError, match="beyond the staging budget"):
            assert_bounded(peaks(shapes, STAGING, paths=["state_dict"], **formats), STAGING)


def test_a_planted_full_size_temporary_breaks_the_bound(monkeypatch):
    through_staging = transfer.Exporter._through_staging

    def through_a_temporary(self, state, target):
        whole = torch.empty(state.local.shape, dtype=torch.float32, device=state.local.device)
        through_staging(self, state, target)
        del whole

    with fake_cuda_world() as mesh:
        shapes = dense(mesh, 1 << 20, 1)
        assert_bounded(peaks(shapes, STAGING, paths=["state_dict"]), STAGING)
        monkeypatch.setattr(transfer.Exporter, "_through_staging", through_a_temporary)
        with pytest.raises(AssertionError, match="beyond the staging budget"):
            assert_bounded(peaks(shapes, STAGING, paths=["state_dict"]), STAGING)


def test_a_full_state_dict_has_at_most_one_full_tensor_more_on_the_device_than_usual():
    with fake_cuda_world((8,)) as mesh:
        shapes = dense(mesh, 1 << 18, 6)
        full_bytes = 4 * 8 * (1 << 18)
        on = peaks(shapes, STAGING, paths=["get, full"])["get, full"]
        off = peaks(shapes, STAGING, offload=False, paths=["get, full"])["get, full"]
        assert on.extra <= off.extra + full_bytes
        assert on.kept == off.kept == 0


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(lambda shape: torch.empty(shape, dtype=torch.bfloat16, device="cuda:0"), id="bf16 on the device"),
        pytest.param(lambda shape: torch.empty(shape[::-1], device="cuda:0").t(), id="transposed on the device"),
        pytest.param(lambda shape: torch.empty(shape[::-1]).t(), id="transposed on the host"),
        pytest.param(lambda shape: torch.empty(shape, dtype=torch.float64), id="float64 on the host"),
        pytest.param(lambda shape: torch.empty(shape[1], device="cuda:0").expand(shape), id="expanded on the device"),
    ],
)
@pytest.mark.parametrize("whole", [False, True], ids=["the share", "the full tensor"])
def test_a_load_from_any_form_of_values_takes_at_most_the_staging_budget(values, whole):
    with fake_cuda_world((8,)) as mesh, LiveBytes() as live:
        model, optimizer = build([Shape((512, 1024), mesh, (Shard(0),))], STAGING)
        (param,) = model.parameters()
        exported = optimizer.state_dict()
        given = values(tuple(param.shape))
        if not whole:
            given = torch.distributed.tensor.DTensor.from_local(values((512, 1024)), mesh, (Shard(0),), run_check=False)
        exported["state"][0] |= {"exp_avg": given, "exp_avg_sq": given, "master_param": given}
        live.mark()
        optimizer.load_state_dict(exported)
        assert live.extra <= STAGING
        assert live.kept == 0


def test_state_is_laid_out_as_the_parameter_on_its_mesh():
    # Without a grad mode: autograd's thread for the device would ask for a driver.
    with fake_cuda_world((8, 8), ("dp", "ep")) as mesh, torch.no_grad():
        model, optimizer = build(mixture_of_experts(mesh), 64 << 20)
        exported = optimizer.state_dict()["state"]
        for i, param in enumerate(model.parameters()):
            for name in ("exp_avg", "exp_avg_sq", "master_param"):
                live, host = optimizer.state[param][name], exported[i][name]
                for state, device in ((live, "cuda"), (host, "cpu")):
                    assert state.device_mesh == param.device_mesh
                    assert state.placements == param.placements
                    assert (state.shape, state.stride()) == (param.shape, param.stride())
                    assert state.to_local().shape == param.to_local().shape
                    assert state.to_local().device.type == device
                assert host.dtype is torch.float32
