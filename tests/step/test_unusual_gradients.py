"""Gradients, parameters and surroundings that nobody lists until they break something."""

import collections
import copy
import threading

import pytest
import torch
from helpers.bits import differences, same_bits, snapshot
from helpers.modes import Mode
from helpers.training import train
from statestream import FusedAdam

BF16, FP32 = torch.bfloat16, torch.float32


def stepped(param, grad, **arguments):
    param.grad = grad
    FusedAdam([param], lr=0.1, **arguments).step()
    return param.detach().clone()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,)])
def test_a_gradient_that_torch_negates_lazily_has_its_sign(shape):
    """A real parameter in a complex graph: its gradient may be an imaginary part with a negation pending."""
    signs = []
    for resolve in (False, True):
        phase = torch.nn.Parameter(torch.full(shape, 0.5))
        (torch.complex(torch.full(shape, 2.0), phase).conj() * (1 + 3j)).real.sum().backward()
        assert phase.grad.is_neg() or phase.numel() > 1, "torch no longer negates lazily here"
        optimizer = FusedAdam([phase], lr=0.1)
        if resolve:
            phase.grad = phase.grad.resolve_neg()
        optimizer.step()
        signs.append(phase.detach().clone())
        assert torch.all(optimizer.state[phase]["exp_avg"] > 0), "d/dp of Re((2 - ip)(1 + 3i)) is 3"
    assert same_bits(*signs)


def test_a_gradient_with_a_graph_of_its_own_is_only_read():
    first, second = (torch.nn.Parameter(torch.arange(1.0, 5.0)) for _ in range(2))
    (grad,) = torch.autograd.grad((first**3).sum(), first, create_graph=True)
    assert same_bits(stepped(first, grad), stepped(second, grad.detach().clone()))
    assert grad.requires_grad and first.is_leaf


def test_a_gradient_shared_by_two_parameters_serves_both():
    a, b, alone = (torch.nn.Parameter(torch.ones(40)) for _ in range(3))
    shared = torch.randn(40)
    a.grad = b.grad = shared
    FusedAdam([a, b], lr=0.1).step()
    assert same_bits(a, stepped(alone, shared.clone())) and same_bits(a, b)


def test_parameters_that_are_views_of_one_buffer_keep_to_their_parts():
    """Flat-parameter trainers: the neighbours' bytes stay."""
    buffer = torch.randn(100)
    before = buffer.clone()
    views = [torch.nn.Parameter(buffer[i : i + 25]) for i in (0, 25, 75)]
    optimizer = FusedAdam(views, lr=0.1)
    for view in views:
        view.grad = torch.ones(25)
    optimizer.step()
    assert same_bits(buffer[50:75], before[50:75])
    assert not (buffer[:50] == before[:50]).any() and not (buffer[75:] == before[75:]).any()


def test_gradients_that_are_views_of_one_bucket_are_read_where_they_are():
    bucket = torch.randn(60)
    a, b, c, d = (torch.nn.Parameter(torch.ones(30)) for _ in range(4))
    a.grad, b.grad = bucket[:30], bucket[30:]
    FusedAdam([a, b], lr=0.1).step()
    assert same_bits(a, stepped(c, bucket[:30].clone())) and same_bits(b, stepped(d, bucket[30:].clone()))


def test_a_step_in_inference_mode_leaves_state_that_can_be_written_later():
    param = torch.nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = FusedAdam([param], lr=0.1, master_weights=True)
    param.grad = torch.ones(4, dtype=BF16)
    with torch.inference_mode():
        optimizer.step()
        exported = optimizer.state_dict()
    assert not any(value.is_inference() for value in optimizer.state[param].values())
    optimizer.step()
    optimizer.load_state_dict(exported)
    optimizer.refresh_masters()
    assert (
        optimizer.state[param]["step"] is exported["state"][0]["step"]
        and not exported["state"][0]["step"].is_inference()
    )


def test_gradients_made_in_inference_mode_are_read():
    param, same = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    with torch.inference_mode():
        grad = torch.full((4,), 2.0)
    optimizer = FusedAdam([param], lr=0.1, use_decoupled_grad=True)
    param.decoupled_grad = grad
    optimizer.step()
    assert same_bits(param, stepped(same, torch.full((4,), 2.0)))


def test_a_parameter_subclass_in_python_is_an_ordinary_parameter():
    class Weight(torch.nn.Parameter):
        pass

    ours, plain = Weight(torch.ones(9)), torch.nn.Parameter(torch.ones(9))
    assert same_bits(
        stepped(ours, torch.randn(9, generator=torch.Generator().manual_seed(1))),
        stepped(plain, torch.randn(9, generator=torch.Generator().manual_seed(1))),
    )


def test_a_gradient_still_in_a_collective_is_waited_for():
    functional = pytest.importorskip("torch.distributed._functional_collectives")
    param, plain = (torch.nn.Parameter(torch.ones(9)) for _ in range(2))
    optimizer = FusedAdam([param], lr=0.1, use_decoupled_grad=True)
    param.decoupled_grad = functional.AsyncCollectiveTensor(torch.full((9,), 3.0))
    optimizer.step()
    assert same_bits(param, stepped(plain, torch.full((9,), 3.0)))


def test_plain_tensors_that_require_grad_are_parameters():
    tensor = torch.ones(5, requires_grad=True)
    optimizer = FusedAdam([tensor], lr=0.1)
    (tensor * 2).sum().backward()
    optimizer.step()
    assert torch.allclose(tensor, torch.full((5,), 0.9))


def test_more_dimensions_than_anyone_uses():
    shape = (2, 1, 3, 1, 2, 1, 2, 1, 1, 2)
    deep, flat = torch.nn.Parameter(torch.ones(shape)), torch.nn.Parameter(torch.ones(48))
    grad = torch.randn(48)
    assert same_bits(stepped(deep, grad.view(shape)).reshape(-1), stepped(flat, grad))


def test_state_put_aside_and_emptied_by_a_trainer_is_made_again():
    param = torch.nn.Parameter(torch.ones(5, dtype=BF16))
    optimizer = FusedAdam([param], lr=0.1, master_weights=True)
    train(optimizer, range(2))
    optimizer.state.clear()
    train(optimizer, range(2, 3))
    assert optimizer.state[param]["step"].item() == 1
    optimizer.state = collections.defaultdict(dict)  # as some trainers reset it
    train(optimizer, range(3, 4))
    assert optimizer.state[param]["step"].item() == 1
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "master_param"}


def test_an_optimizer_that_was_reset_by_a_dictionary_of_ones_own_goes_on():
    mode = Mode(BF16, BF16, BF16, "fp32")
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(5, dtype=BF16))], lr=0.1, **mode.arguments)
    train(optimizer, range(2))
    saved, of_two_steps = copy.deepcopy(optimizer.state_dict()), snapshot(optimizer)
    bytes_held = optimizer.memory_report().host
    optimizer.state = collections.defaultdict(dict)
    optimizer.refresh_masters()
    optimizer.load_state_dict(saved)
    assert differences(of_two_steps, snapshot(optimizer)) == []
    assert optimizer.memory_report().host == bytes_held


def test_default_dtype_and_deterministic_fill_change_no_bit():
    def run():
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(50, dtype=FP32))
        optimizer = FusedAdam([param], lr=0.1, **Mode(FP32, BF16, BF16).arguments)
        train(optimizer, range(3))
        optimizer.load_state_dict(optimizer.state_dict())
        return snapshot(optimizer)

    plain = run()
    default, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        assert differences(plain, run()) == []
    finally:
        torch.set_default_dtype(default)
        torch.use_deterministic_algorithms(deterministic)


def test_a_default_device_does_not_catch_state():
    param = torch.nn.Parameter(torch.ones(5, device="cpu"))
    optimizer = FusedAdam([param], lr=0.1, state_dict_cpu_offload=True)
    with torch.device("meta"):
        param.grad = torch.ones(5, device="cpu")
        optimizer.step()
        exported = optimizer.state_dict()
        optimizer.load_state_dict(exported)
    assert all(v.device.type == "cpu" for v in exported["state"][0].values())
    assert exported["state"][0]["exp_avg"].tolist() == pytest.approx([0.1] * 5)


def test_steps_from_two_threads_on_two_optimizers_do_not_meet():
    def run():
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.ones(5000))
        optimizer = FusedAdam([param], lr=0.1)
        for step in range(20):
            param.grad = torch.full((5000,), float(step - 10))
            optimizer.step()
        results.append(param.detach())

    results = []
    run()
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same_bits(results[0], result) for result in results) and len(results) == 5
