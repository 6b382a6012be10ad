"""Gradients exchanged in parts: right sums in any arrangement, the order of parts, and steps that fail half-way."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from socflower.peers.collective import Collective, PeerLost, Poll, Work, no_poll
from socflower.peers.ring.bucket_exchange import BucketExchange, TurnCallbacks
from socflower.peers.transports.in_process import in_process_rings
from tests.one_line import refused
from tests.seeded import built
from tests.training.exchange.test_compression import compression as member_of

NUM_MEMBERS = 3
PATIENCE_S = 60.0

Inputs = Tensor | None  # None for a member without samples


class Enough(Exception):
    """What polls raise here."""


class Watched(Collective):
    """A ring that notes what is begun, and may change how long a wait takes."""

    def __init__(self, ring: Collective, begun: Callable[[Tensor], None] = no_poll) -> None:
        self.rank, self.size, self.transport = ring.rank, ring.size, ring.transport
        self.buffers: list[Tensor] = []
        self.gate = threading.Event()
        self.gate.set()
        self._ring, self._begun = ring, begun

    def all_reduce(self, buffer: Tensor) -> Work:
        assert self.gate.wait(PATIENCE_S)
        self.buffers.append(buffer)
        self._begun(buffer)
        return self._ring.all_reduce(buffer)

    def all_gather(self, payload: bytes, poll: Poll = no_poll) -> list[bytes]:
        return self._ring.all_gather(payload, poll)

    def broadcast(self, payload: bytes | None, source: int, poll: Poll = no_poll) -> bytes:
        return self._ring.broadcast(payload, source, poll)

    def close(self) -> None:
        self._ring.close()


@contextmanager
def rings_of(size: int = NUM_MEMBERS) -> Iterator[list[Watched]]:
    made = [Watched(ring) for ring in in_process_rings(size)]
    try:
        yield made
    finally:
        for ring in made:
            ring.gate.set()
            ring.close()


def network() -> nn.Module:
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 3),
            nn.Tanh(),
            nn.Conv2d(6, 4, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(64, 9),
            nn.Tanh(),
            nn.Linear(9, 5),
        ),
        3,
    )


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 2, 8, 8, generator=generator) for _ in range(NUM_MEMBERS)]


def passes(model: nn.Module, inputs: Inputs) -> None:
    """Make this member's gradient as trainers do."""
    for parameter in model.parameters():
        parameter.grad = None
    if inputs is not None:
        model(inputs).square().sum().backward()


def expected(model: nn.Module, inputs: Sequence[Inputs]) -> list[Tensor | None]:
    """Return the sum of all members' gradients as plain torch makes it, by parameter."""
    model = copy.deepcopy(model)
    for own in inputs:
        if own is not None:
            model(own).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def one_step(
    exchange: BucketExchange, model: nn.Module, ring: Collective, inputs: Inputs, **options: Any
) -> list[Tensor | None]:
    exchange.begin(ring, no_poll, **options)
    passes(model, inputs)
    exchange.finish()
    return [
        None if parameter.grad is None else parameter.grad.clone()
        for parameter in model.parameters()
    ]


def on_all(
    rings: Sequence[Collective], member: Callable[[int], Any], *others: Collective
) -> list[Any]:
    """Return what every member comes to, each in a thread of its own; `others` are rings that they use later."""

    def guarded(rank: int) -> Any:
        try:
            return member(rank)
        except BaseException:
            # Or the others would wait for this one for ever.
            for ring in (*rings, *others):
                ring.close()
            raise

    with ThreadPoolExecutor(len(rings)) as pool:
        return list(pool.map(guarded, range(len(rings))))


def on_copies(
    model: nn.Module, num_buckets: int, inputs: Sequence[Inputs], **options: Any
) -> list[list[Tensor | None]]:
    """Return every member's gradients after one step with a copy of `model` each."""
    with rings_of(len(inputs)) as rings:

        def member(rank: int) -> list[Tensor | None]:
            own = copy.deepcopy(model)
            return one_step(
                BucketExchange(own, num_buckets), own, rings[rank], inputs[rank], **options
            )

        return on_all(rings, member)


def require_sums(
    found: list[list[Tensor | None]],
    model: nn.Module,
    inputs: Sequence[Inputs],
    tolerance: float = 1e-5,
) -> None:
    for index, wanted in enumerate(expected(model, inputs)):
        for gradients in found:
            own, first = gradients[index], found[0][index]
            assert (own is None) == (wanted is None)
            if own is not None and wanted is not None and first is not None:
                torch.testing.assert_close(
                    own, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max())
                )
                assert torch.equal(own, first), "members have different bits"


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("num_buckets", [1, 2, 3, 100])
def test_every_member_has_the_sum_whatever_the_number_of_parts(
    num_buckets: int, overlapped: bool
) -> None:
    model = network()
    assert BucketExchange(model, num_buckets).num_buckets == min(
        num_buckets, 6
    )  # small ones travel together
    require_sums(on_copies(model, num_buckets, images(), overlapped=overlapped), model, images())


def test_parts_have_about_equal_bytes_and_begin_with_the_last_layers() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(12)))
    with rings_of(1) as (ring,):
        one_step(BucketExchange(model, 4), model, ring, torch.ones(1, 10))
        assert [buffer.numel() for buffer in ring.buffers] == [300] * 4
        grad = model[11].weight.grad
        assert grad is not None and grad.data_ptr() == ring.buffers[0].data_ptr()


def test_tied_and_frozen_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight
            self.frozen.requires_grad_(False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.second(self.frozen(torch.tanh(self.first(inputs))))

    model, inputs = built(Tied, 1), [torch.full((2, 6), 0.1 * rank) for rank in range(NUM_MEMBERS)]
    found = on_copies(model, 3, inputs)
    require_sums(found, model, inputs)
    assert sum(gradient is None for gradient in found[0]) == 2  # the frozen layer's


@pytest.mark.parametrize("overlapped", [True, False])
def test_a_member_without_samples_adds_nothing_and_has_the_sum(overlapped: bool) -> None:
    model, inputs = network(), [images()[0], None, images()[2]]
    require_sums(on_copies(model, 3, inputs, overlapped=overlapped), model, inputs)


def test_a_layer_that_only_some_members_use() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.always(inputs)
            return self.sometimes(hidden) if float(inputs.sum()) > 0 else hidden

    model, inputs = built(Branch, 1), [torch.ones(2, 4), -torch.ones(2, 4), torch.ones(2, 4)]
    # The part that is never complete in one member's pass is the first in order: the others wait for it to the end.
    require_sums(on_copies(model, 4, inputs), model, inputs)


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_keep_the_layout_of_channels_last_weights(when: str) -> None:
    """Trainers choose the layout, also after the exchange was made."""
    model = network()
    with rings_of() as rings:

        def member(rank: int) -> list[Tensor | None]:
            own = copy.deepcopy(model)
            if when == "before":
                own = own.to(memory_format=torch.channels_last)
            exchange = BucketExchange(own, 2)
            own = own.to(memory_format=torch.channels_last)
            one_step(
                exchange,
                own,
                rings[rank],
                images()[rank].contiguous(memory_format=torch.channels_last),
            )
            for parameter in own.parameters():
                assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
            return [parameter.grad for parameter in own.parameters()]

        require_sums(on_all(rings, member), model, images())


def test_weights_with_gaps_or_in_any_order_of_dimensions() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gaps = nn.Parameter(torch.randn(4, 6)[:, ::2])
            # Sorted, its strides are those of a contiguous (2, 3); yet it has gaps.
            self.skewed = nn.Parameter(torch.randn(10).as_strided((2, 3), (1, 3)))
            self.turned = nn.Parameter(torch.randn(3, 2, 4).permute(2, 0, 1))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs @ self.gaps @ self.skewed.T @ self.turned[1].T * self.turned.sum()

    model, inputs = built(Odd, 2), [torch.full((2, 4), 1.0 + rank) for rank in range(NUM_MEMBERS)]
    found = on_copies(model, 1, inputs)
    require_sums(found, model, inputs)
    assert found[0][2] is not None and found[0][2].stride() == model.turned.stride()


def test_parameters_of_several_types_travel_apart() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].double()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layers[2](self.layers[1](self.layers[0](inputs).double()).float())

    inputs = [torch.full((2, 5), 0.3 * rank) for rank in range(NUM_MEMBERS)]
    assert BucketExchange(Mixed(), 1).num_buckets == 3
    require_sums(on_copies(Mixed(), 1, inputs), Mixed(), inputs)


def test_parts_go_out_in_one_order_whatever_the_timing() -> None:
    """A member whose layers end in another order, another that is slow: all send the same parts one after the other."""

    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3 + width) for width in range(4))

        def forward(self, inputs: Tensor) -> Tensor:
            order = range(4) if float(inputs.mean()) > 0 else reversed(range(4))
            return torch.stack([self.layers[index](inputs).sum() for index in order])

    model, inputs = built(Fork, 1), [torch.ones(2, 3), -torch.ones(2, 3), 2 * torch.ones(2, 3)]
    with rings_of() as rings:

        def member(rank: int) -> list[Tensor | None]:
            own = copy.deepcopy(model)
            exchange = BucketExchange(own, 8)
            found = []
            for _ in range(5):
                found = one_step(exchange, own, rings[rank], inputs[rank])
            return found

        require_sums(on_all(rings, member), model, inputs)
        sizes = [[buffer.numel() for buffer in ring.buffers] for ring in rings]
    # Linear layers of 18 + 6, 15 + 5, 12 + 4 and 9 + 3 values, from the last to the first, in parts of about 9.
    assert sizes == [[6, 18, 5, 15, 4, 12, 3, 9] * 5] * NUM_MEMBERS


def test_the_first_part_is_sent_before_the_pass_is_over() -> None:
    model = network()
    num_begun: list[int] = []
    model[0].weight.register_hook(lambda gradient: num_begun.append(len(ring.buffers)))
    with rings_of(1) as (ring,):
        exchange = BucketExchange(model, 8)
        one_step(exchange, model, ring, images()[0])
        one_step(exchange, model, ring, images()[0], overlapped=False)
        # All but the first layer's weight and, where that comes later, its bias; then those of the step before.
        assert num_begun[0] in (exchange.num_buckets - 1, exchange.num_buckets - 2)
        assert num_begun[1] == exchange.num_buckets


@pytest.mark.parametrize("where", ["in the pass", "while waiting"])
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_step_that_fails_and_is_done_again_leaves_nothing_behind(
    where: str, compression: str
) -> None:
    model, wrong = network(), [1000 * own for own in images()]
    given_up = threading.Barrier(NUM_MEMBERS, timeout=PATIENCE_S)
    with rings_of() as broken, rings_of() as again:

        def member(rank: int) -> list[Tensor | None]:
            own = copy.deepcopy(model)
            exchange = BucketExchange(own, 4)
            compressed = None if compression == "none" else member_of(compression, ratio=0.3)
            num_polls = 0

            def poll() -> None:
                nonlocal num_polls
                num_polls += 1
                if num_polls > (5 if where == "in the pass" else 8):
                    raise Enough

            if compressed is not None:
                compressed.start_step(0)
            agree(exchange, broken[rank])
            # The last member never begins, so that the others wait for what never comes.
            if rank < NUM_MEMBERS - 1:
                exchange.begin(broken[rank], poll, compression=compressed)
                with pytest.raises(Enough):
                    passes(own, wrong[rank])
                    exchange.finish()
            given_up.wait()
            exchange.abandon()
            broken[rank].close()
            assert all(parameter.grad is None for parameter in own.parameters())
            if compressed is not None:
                compressed.start_step(0)
            found = one_step(exchange, own, again[rank], images()[rank], compression=compressed)
            if compressed is not None:
                compressed.finish_step()
            return found

        found = on_all(broken, member)
    if compression == "none":
        require_sums(found, model, images())
    else:
        reference = compressed_step(model, compression)
        for gradients in found:
            for own, wanted in zip(gradients, reference, strict=True):
                assert own is not None and wanted is not None and torch.equal(own, wanted)


def agree(exchange: BucketExchange, ring: Collective) -> None:
    """Have all members agree on the layout, so that a step that fails does not already fail there."""
    exchange.begin(ring, no_poll)
    exchange._step = None


def compressed_step(model: nn.Module, compression: str) -> list[Tensor | None]:
    with rings_of() as rings:

        def member(rank: int) -> list[Tensor | None]:
            own, compressed = copy.deepcopy(model), member_of(compression, ratio=0.3)
            compressed.start_step(0)
            return one_step(
                BucketExchange(own, 4), own, rings[rank], images()[rank], compression=compressed
            )

        return on_all(rings, member)[0]


def test_what_is_written_late_into_a_failed_steps_buffers_is_seen_by_nobody() -> None:
    """As gloo's threads do, which go on reducing for a while after a member has given up."""
    model = network()
    with rings_of(1) as (ring,), rings_of(1) as (again,):
        exchange = BucketExchange(model, 4)
        exchange.begin(ring, no_poll)
        passes(model, images()[0])  # all is sent; but the step is given up
        exchange.abandon()
        exchange.begin(again, no_poll)
        passes(model, images()[0])
        for buffer in ring.buffers:
            buffer.fill_(float("nan"))
        exchange.finish()
        for buffer in ring.buffers:
            buffer.fill_(float("inf"))
        require_sums([[parameter.grad for parameter in model.parameters()]], model, images()[:1])
    assert not {buffer.data_ptr() for buffer in ring.buffers} & {
        buffer.data_ptr() for buffer in again.buffers
    }


def test_a_lost_peer_ends_the_step_and_the_survivors_do_it_again() -> None:
    model = network()
    with rings_of() as rings, rings_of(2) as survivors:

        def member(rank: int) -> list[Tensor | None] | None:
            own = copy.deepcopy(model)
            exchange = BucketExchange(own, 4)
            if rank == 2:
                exchange.begin(rings[rank], no_poll)
                passes(own, images()[rank])
                rings[rank].close()
                return None
            with pytest.raises(PeerLost):
                # What the lost one had sent may be enough for one step, or not even to begin it.
                while True:
                    exchange.begin(rings[rank], no_poll)
                    passes(own, images()[rank])
                    exchange.finish()
            exchange.abandon()
            rings[rank].close()
            return one_step(exchange, own, survivors[rank], images()[rank])

        require_sums(on_all(rings, member, *survivors)[:2], model, images()[:2])


def test_a_turn_begins_before_the_first_part_and_ends_after_the_last() -> None:
    model = network()
    happened: list[list[str]] = [[] for _ in range(NUM_MEMBERS)]
    with rings_of() as rings:

        def member(rank: int) -> list[Tensor | None]:
            own, mine = copy.deepcopy(model), happened[rank]
            ring = Watched(rings[rank], lambda _: mine.append("part"))
            turn = TurnCallbacks(begin=lambda: mine.append("begin"), end=lambda: mine.append("end"))
            return one_step(BucketExchange(own, 4), own, ring, images()[rank], turn=turn)

        require_sums(on_all(rings, member), model, images())
    assert happened == [["begin", *["part"] * 4, "end"]] * NUM_MEMBERS


def test_the_backward_pass_does_not_wait_for_the_turn() -> None:
    model = network()
    may_begin = threading.Event()
    with rings_of(1) as (ring,):
        exchange = BucketExchange(model, 4)
        exchange.begin(
            ring,
            no_poll,
            turn=TurnCallbacks(begin=lambda: require(may_begin.wait(PATIENCE_S)), end=lambda: None),
        )
        passes(model, images()[0])
        assert not ring.buffers  # the pass is over, and nothing has been sent
        may_begin.set()
        exchange.finish()
        assert len(ring.buffers) == 4
        require_sums([[parameter.grad for parameter in model.parameters()]], model, images()[:1])


def test_a_turn_that_is_waited_for_in_vain_ends_with_what_the_poll_raises() -> None:
    model = network()
    given_up = threading.Event()
    ended = []

    def poll() -> None:
        if waiting:
            raise Enough

    with rings_of(1) as (ring,):
        exchange = BucketExchange(model, 4)
        waiting = False
        exchange.begin(
            ring,
            poll,
            turn=TurnCallbacks(
                begin=lambda: require(given_up.wait(PATIENCE_S)), end=lambda: ended.append(True)
            ),
        )
        passes(model, images()[0])
        waiting = True
        with pytest.raises(Enough):
            exchange.finish()
        exchange.abandon()
        given_up.set()  # the turn comes, too late: nothing may be sent any more
        waiting = False
        one_step(exchange, model, ring, images()[0])
        assert len(ring.buffers) == 4 and not ended


def test_what_fails_in_the_turn_is_raised_where_the_step_ends() -> None:
    def fail() -> None:
        raise PeerLost("the turn's host is gone")

    model = network()
    with rings_of(1) as (ring,):
        exchange = BucketExchange(model, 4)
        exchange.begin(ring, no_poll, turn=TurnCallbacks(begin=fail, end=lambda: None))
        passes(model, images()[0])
        with pytest.raises(PeerLost, match="host"):
            exchange.finish()
        assert not ring.buffers


def test_members_that_differ_are_told_so() -> None:
    with rings_of() as rings:

        def member(rank: int) -> None:
            own = network()
            exchange = BucketExchange(own, 2)
            # Its trainer wants another layout: flat buffers would be in another order.
            if rank == 1:
                own.to(memory_format=torch.channels_last)
            refused(lambda: exchange.begin(rings[rank], no_poll), "layout")

        on_all(rings, member)


def test_a_gradient_that_is_made_twice_is_no_overlapped_step() -> None:
    model = network()
    with rings_of(1) as (ring,):
        exchange = BucketExchange(model, 1)
        exchange.begin(ring, no_poll)
        passes(model, images()[0])
        with pytest.raises(RuntimeError, match="overlapped=False"):
            model(images()[1]).square().sum().backward()
        exchange.abandon()
        exchange.begin(ring, no_poll, overlapped=False)
        passes(model, images()[0])
        model(images()[1]).square().sum().backward()
        exchange.finish()
        require_sums([[parameter.grad for parameter in model.parameters()]], model, images()[:2])


def test_an_exchange_that_was_closed_leaves_the_model_alone() -> None:
    model = network()
    with rings_of(1) as (ring,):
        exchange = BucketExchange(model, 4)
        exchange.begin(ring, no_poll)
        exchange.close()
        passes(model, images()[0])
        assert not ring.buffers
        require_sums([[parameter.grad for parameter in model.parameters()]], model, images()[:1])


def require(condition: bool) -> None:
    assert condition


def test_frozen_parameters_are_in_no_part_and_stay_without_gradient() -> None:
    """Also in the member that has no samples."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2)]
    for model in models:
        model[1].requires_grad_(False)
        model[2].bias.requires_grad_(False)
    exchanges = [BucketExchange(model, num_buckets=2) for model in models]
    assert sum(exchanges[0].bucket_sizes) == 4 * 4 + 4 + 4 * 2

    def step(place: int, ring: Collective) -> None:
        exchanges[place].begin(ring, no_poll)
        if place:
            models[place](torch.ones(3, 4)).sum().backward()
        exchanges[place].finish()

    with rings_of(2) as rings, ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(step, place, ring) for place, ring in enumerate(rings)]:
            done.result(PATIENCE_S)
    for model in models:
        assert [parameter.grad is None for parameter in model.parameters()] == [
            False,
            False,
            True,
            True,
            False,
            True,
        ]
