"""Offload with a copier that needs no GPU: what goes, what comes back, when, and that nothing else changes."""

import gc
import weakref

import pytest
import torch

from conf.compose import compose
from conf.schema import Recompute
from parallel.apply import lay_out
from parallel.offload import Offload
from tests.unit.test_recompute import LENGTH, POLICIES, gradients_of, layers_of, loss_of, model_of


class Copies:
    """A host that is here: copies are made at once. Remembers what was asked for."""

    def __init__(self):
        self.sources, self.hosts, self.fetched, self.waits = [], [], [], 0

    def to_host(self, x):
        self.sources.append(weakref.ref(x.untyped_storage()))
        self.hosts.append(x.clone())
        return self.hosts[-1], len(self.hosts)

    def to_device(self, host):
        self.fetched.append(next(i for i, known in enumerate(self.hosts) if known is host))
        return host.clone(), None

    def wait(self, event):
        self.waits += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_the_same_bit_for_bit(policy, dtype):
    offload = Offload(copies := Copies(), min_bytes=1)
    loss, grads = gradients_of(model_of(policy, num_layers=3, dtype=dtype, offload=offload))
    want, truths = gradients_of(model_of(policy, num_layers=3, dtype=dtype))
    assert torch.equal(loss, want) and copies.hosts
    assert all(torch.equal(grad, truth) for grad, truth in zip(grads, truths, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_all_layers_but_the_last_keep_is_on_the_host_alone(policy, dtype):
    """Byte for byte, each storage once; between forward and backward nothing of it is left on the device."""
    width, queries, keys, heads = 32, 32, 16, 4
    lists = {
        Recompute.none: (4 * width + 2 * queries + 2 * keys, heads + 2),
        Recompute.block: (width + queries, heads),
        Recompute.full: (width, 0),
    }
    elements, wide = lists[policy]
    model = model_of(policy, num_layers=4, dtype=dtype, offload=Offload(copies := Copies(), min_bytes=1))
    loss = loss_of(model)
    assert sum(host.numel() for host in copies.hosts) == 3 * LENGTH * (elements * dtype.itemsize + wide * 4)
    assert not any(source() for source in copies.sources)
    loss.backward()
    assert sorted(copies.fetched) == list(range(len(copies.hosts)))


def test_layers_come_back_one_ahead():
    """The last layer's backward asks for those of the one before it, and so on; two layers are here at most."""
    offload = Offload(copies := Copies(), min_bytes=1)
    model = model_of(Recompute.block, num_layers=4, offload=offload)
    events = []
    for number, layer in enumerate(model.layers):
        layer.register_full_backward_hook(lambda *_, number=number: events.append((number, list(copies.fetched))))
    per_layer = 3  # its input, out and lse
    loss_of(model).backward()
    assert len(copies.hosts) == 3 * per_layer
    for number, fetched in events:  # at the end of a layer's backward: its own, and the layer's before it
        expected = range(max(0, number - 1) * per_layer, 3 * per_layer)
        assert sorted(fetched) == list(expected), number


def test_nothing_stays_on_the_host_after_backward():
    """No cycle keeps it: it goes without the garbage collector."""
    model = model_of(Recompute.block, num_layers=3, offload=Offload(copies := Copies(), min_bytes=1))
    hosts = lambda: [weakref.ref(host) for host in copies.hosts]  # noqa: E731
    for run in (lambda loss: loss.backward(), lambda loss: None):  # the second graph is dropped unused
        loss = loss_of(model)
        alive = hosts()
        assert len(alive) > 3
        copies.hosts.clear()
        copies.to_device = lambda host: (host.clone(), None)
        run(loss)
        del loss
        assert not any(host() for host in alive)


def test_small_and_shared_tensors_stay():
    """Parameters, angles and plans are everybody's; a tensor below the limit is not worth its copy."""
    limit = LENGTH * 32 * 4
    model = model_of(Recompute.none, num_layers=3, offload=Offload(copies := Copies(), min_bytes=limit))
    loss_of(model)
    # k, v and everything of a number for each token are smaller than the residual stream; q and out are not.
    assert [host.numel() for host in copies.hosts] == 2 * 6 * [limit]


def test_without_gradients_nothing_moves():
    model = model_of(Recompute.block, num_layers=3, offload=Offload(copies := Copies(), min_bytes=1))
    with torch.no_grad():
        loss_of(model)
    assert not copies.hosts


def test_two_forwards_before_their_backwards():
    model = model_of(Recompute.block, num_layers=3, offload=Offload(Copies(), min_bytes=1))
    _, truths = gradients_of(model_of(Recompute.block, num_layers=3))
    losses = loss_of(model), loss_of(model)
    for loss in reversed(losses):
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert all(torch.equal(grad, truth) for grad, truth in zip(grads, truths, strict=True))


def test_a_second_backward_fetches_again_or_says_why_not():
    def twice(policy):
        model = model_of(policy, num_layers=3, offload=Offload(Copies(), min_bytes=1))
        out = layers_of(model).sum()
        return [torch.autograd.grad(out, list(model.layers.parameters()), retain_graph=True) for _ in range(2)]

    first, second = twice(Recompute.none)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="taken twice"):
        twice(Recompute.block)


@pytest.mark.parametrize("policy", ["none", "block", "full"])
def test_a_cpu_is_refused_before_anything_is_built(policy):
    config = compose(["train.offload=true", f"train.recompute={policy}"])
    with pytest.raises(ValueError, match=r"train\.offload=true needs a GPU.* Use train\.offload=false"):
        lay_out(config, None, None, torch.device("cpu"))


def test_a_backward_that_ends_early_waits_for_what_it_asked_for():
    """Memory that a copy is still written into must not be given back to what is computed next."""

    class Recorder:
        def __init__(self):
            self.started, self.waited = set(), set()

        def to_host(self, x):
            return x.clone(), None

        def to_device(self, host):
            self.started.add(len(self.started))
            return host.clone(), len(self.started) - 1

        def wait(self, event):
            if event is not None:
                self.waited.add(event)

    copier = Recorder()
    model = model_of(Recompute.block, num_layers=3, offload=Offload(copier, min_bytes=1))
    loss = loss_of(model)
    torch.autograd.grad(loss, list(model.layers[-1].parameters()))
    del loss, model
    gc.collect()
    assert copier.started == copier.waited
