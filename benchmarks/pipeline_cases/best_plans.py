"""The quickest plan of a small problem by brute force: all orders, groups, cuts, shares and K, in the simulator.

A lower bound of each plan's simulated seconds spares most simulations: the same passes and messages in the same order,
but with each transfer alone on its links. Transfers that share links only take longer, so the bound holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, pairwise, permutations, product
from math import inf

import numpy as np

from socflower.pipeline.plan import Members, PipelinePlan, slices_between, staged
from socflower.pipeline.problem import Floats, Ints, PipelineDevice, PipelineProblem
from socflower.pipeline.schedule.run import simulate_schedule

# A plan whose bound is less than this part below the best is not simulated.
_TOLERANCE = 5e-4
# Rows of K that are bounded at once.
_MOST_ROWS = 4000


@dataclass
class Best:
    """The quickest plan so far; None if no plan fits."""

    step_s: float = inf
    plan: PipelinePlan | None = None
    num_simulated: int = 0


def best_plan(problem: PipelineProblem, known: PipelinePlan | None = None) -> Best:
    """Return the quickest pipeline of a problem, within 0.05 %; `known` is a plan that spares simulations."""
    best = Best()
    if known is not None:
        best.plan, best.step_s = known, simulate_schedule(problem, known).step_s
    every = [_Cuts.of(problem, members) for members in _structures(problem)]
    for cuts in sorted(every, key=lambda each: float(each.bound_s.min(initial=inf))):
        _try(problem, cuts, best)
    return best


def some_plan_fits(problem: PipelineProblem) -> bool:
    """Return whether any plan of the mini-batch fits, in micro-batches of any size.

    If one does, so does one with a sample a micro-batch: with one device of each of its stages, and K = 1.
    """
    single = replace(problem, micro_batch_size=1, num_micro_batches=problem.mini_batch_size)
    return any(len(_Cuts.of(single, members).ends) for members in _structures(single))


def compositions(total: int, parts: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `total` as a sum of `parts` numbers of at least `least`."""
    for inner in combinations(range(total - parts * (least - 1) - 1), parts - 1):
        yield tuple(
            after - before + least - 1
            for before, after in pairwise((-1, *inner, total - parts * (least - 1) - 1))
        )


def _structures(problem: PipelineProblem) -> Iterator[tuple[Members, ...]]:
    """Yield all stages of devices with all their shares; of those that only exchange equal devices, one."""
    classes = {device.soc: _class_of(problem, device) for device in problem.devices}
    seen = set()
    for num_devices in range(1, len(problem.devices) + 1):
        for order in permutations(problem.devices, num_devices):
            for num_stages in range(1, min(problem.model.num_layers, num_devices) + 1):
                for widths in compositions(num_devices, num_stages):
                    for members in _shared(problem, order, widths):
                        key = tuple(
                            tuple((classes[soc], share) for soc, share in own) for own in members
                        )
                        if key not in seen:
                            seen.add(key)
                            yield members


def _shared(
    problem: PipelineProblem, order: Sequence[PipelineDevice], widths: Sequence[int]
) -> Iterator[tuple[Members, ...]]:
    """Yield stages of `widths` devices of an order with all shares."""
    socs = iter(device.soc for device in order)
    groups = [list(islice(socs, width)) for width in widths]
    every = [compositions(problem.micro_batch_size, width) for width in widths]
    for shares in product(*every):
        yield tuple(
            tuple(zip(group, own, strict=True)) for group, own in zip(groups, shares, strict=True)
        )


def _class_of(problem: PipelineProblem, device: PipelineDevice) -> tuple[object, ...]:
    """Return what devices on one board, or each on its own, must have in common to be equal."""
    cluster = problem.cluster
    number = cluster.board_of(device.soc)
    board = cluster.boards[number]
    alone = all(each.num_slots == 1 for each in cluster.boards)
    return (
        id(device.seconds),
        device.memory_bytes,
        device.update_bytes_per_s,
        device.byte_s,
        (board.soc_bytes_per_s, board.uplink_bytes_per_s) if alone else number,
    )


@dataclass
class _Cuts:
    """All cuts of one structure; arrays are [cut] or [cut][stage]."""

    members: tuple[Members, ...]
    # The last layers of the stages.
    ends: Ints
    # The most K within memory, never rising.
    most: Ints
    # By device, in the order of stages.
    forward_s: list[Floats]
    backward_s: list[Floats]
    after_s: list[Floats]
    # Seconds of the transfers of each cut of the model, as (sender, receiver, forward, backward) of devices.
    transfers: list[list[tuple[int, int, Floats, Floats]]]
    # A lower bound for any K.
    bound_s: Floats

    @classmethod
    def of(cls, problem: PipelineProblem, members: tuple[Members, ...]) -> "_Cuts":
        """Return all cuts of a structure whose stages fit the budgets with K = 1."""
        model, num_stages = problem.model, len(members)
        last = np.array(
            [np.cumsum(depths) - 1 for depths in compositions(model.num_layers, num_stages)],
            np.int64,
        )
        first = np.concatenate([np.zeros((len(last), 1), np.int64), last[:, :-1] + 1], axis=1)
        most = _most_in_flight(problem, members, first, last)
        fits = most[:, -1] >= 1
        first, last, most = first[fits], last[fits], most[fits]
        forward_s, backward_s, after_s = [], [], []
        for stage, own in enumerate(members):
            for rank, (soc, share) in enumerate(own):
                there, back = _passes(problem, soc, share, first[:, stage], last[:, stage])
                forward_s.append(there)
                backward_s.append(back)
                after_s.append(_after(problem, own, rank, first[:, stage], last[:, stage]))
        found = cls(members, last, most, forward_s, backward_s, after_s, [], np.zeros(len(last)))
        found.transfers = [
            _transfers(problem, members, stage, last[:, stage]) for stage in range(num_stages - 1)
        ]
        found.bound_s = found._bound_s(problem.num_micro_batches)
        return found

    def _bound_s(self, number: int) -> Floats:
        """Return a lower bound for any K.

        A device or a transfer begins after one micro-batch has passed the stages before it. It is busy for all
        micro-batches, and its last gradient then passes the stages before it, each of which then exchanges and updates.
        """
        bound_s = before_s = behind_s = np.zeros(len(self.ends))
        device = 0
        for stage, own in enumerate(self.members):
            devices = range(device, device + len(own))
            device += len(own)
            forward_s = np.array([self.forward_s[each] for each in devices])
            backward_s = np.array([self.backward_s[each] for each in devices])
            after_s = np.array([self.after_s[each] for each in devices])
            tail_s = np.maximum(after_s, behind_s)
            busy_s = number * (forward_s + backward_s) + tail_s
            bound_s = np.maximum(bound_s, before_s + busy_s.max(axis=0))
            before_s = before_s + forward_s.min(axis=0)
            behind_s = backward_s.min(axis=0) + np.maximum(after_s.min(axis=0), behind_s)
            if stage < len(self.transfers):
                there_s = np.array([own[2] for own in self.transfers[stage]])
                back_s = np.array([own[3] for own in self.transfers[stage]])
                bound_s = np.maximum(bound_s, before_s + number * there_s.max(axis=0) + behind_s)
                bound_s = np.maximum(bound_s, before_s + number * back_s.max(axis=0) + behind_s)
                before_s = before_s + there_s.min(axis=0)
                behind_s = behind_s + back_s.min(axis=0)
        return bound_s

    def lower_bound(self, problem: PipelineProblem, rows: Ints, counts: Ints) -> Floats:
        """Return the seconds of the plans with cuts `rows` and K `counts`, as if transfers never shared a link."""
        return _Schedule(self, rows, counts, problem.num_micro_batches).seconds()


class _Schedule:
    """Many plans of one structure at once, pass by pass; arrays are [plan]."""

    def __init__(self, cuts: _Cuts, rows: Ints, counts: Ints, num_micro_batches: int) -> None:
        self._counts, self._number = counts, num_micro_batches
        self._forward_s = [each[rows] for each in cuts.forward_s]
        self._backward_s = [each[rows] for each in cuts.backward_s]
        self._after_s = [each[rows] for each in cuts.after_s]
        self._columns = np.arange(len(rows))
        self._stages, device = [], 0
        for own in cuts.members:
            self._stages.append(list(range(device, device + len(own))))
            device += len(own)
        self._free_s = [np.zeros(len(rows)) for _ in range(device)]
        self._inputs: list[list[Floats]] = [[] for _ in range(device)]
        self._gradients: list[list[Floats]] = [[] for _ in range(device)]
        self._outputs: list[list[tuple[Floats, Floats, Floats]]] = [[] for _ in range(device)]
        self._returns: list[list[tuple[Floats, Floats, Floats]]] = [[] for _ in range(device)]
        for transfers in cuts.transfers:
            for sender, receiver, there_s, back_s in transfers:
                arrivals, returns = np.zeros((2, num_micro_batches, len(rows)))
                channels = np.zeros((2, len(rows)))
                self._inputs[receiver].append(arrivals)
                self._outputs[sender].append((there_s[rows], channels[0], arrivals))
                self._gradients[sender].append(returns)
                self._returns[receiver].append((back_s[rows], channels[1], returns))

    def seconds(self) -> Floats:
        """Return the ends of all updates."""
        stages, number = range(len(self._stages)), self._number
        for round_number in range(number):
            for stage in stages:
                counts = self._counts[:, stage]
                if round_number:
                    self._pass(stage, counts + round_number - 1, forward=True)
                else:
                    for index in range(int(counts.max(initial=0))):
                        self._pass(stage, np.where(index < counts, index, number), forward=True)
            for stage in reversed(stages):
                self._pass(stage, np.full_like(self._columns, round_number), forward=False)
        return np.max(np.add(self._free_s, self._after_s), axis=0)

    def _pass(self, stage: int, index: Ints, *, forward: bool) -> None:
        """Do a pass of micro-batch `index`; none if that is the number of micro-batches or more."""
        does = index < self._number
        if not does.any():
            return
        index = np.minimum(index, self._number - 1)
        waited, sent, seconds = (
            (self._inputs, self._outputs, self._forward_s)
            if forward
            else (self._gradients, self._returns, self._backward_s)
        )
        for device in self._stages[stage]:
            end_s = self._free_s[device]
            for arrivals in waited[device]:
                end_s = np.maximum(end_s, arrivals[index, self._columns])
            end_s = np.where(does, end_s + seconds[device], self._free_s[device])
            self._free_s[device] = end_s
            for transfer_s, channel, arrivals in sent[device]:
                arrived_s = np.maximum(channel, end_s) + transfer_s
                channel[does] = arrived_s[does]
                arrivals[index[does], self._columns[does]] = arrived_s[does]


def _try(problem: PipelineProblem, cuts: _Cuts, best: Best) -> None:
    """Simulate the plans of a structure whose bounds are below the best."""
    rows = np.flatnonzero(cuts.bound_s < best.step_s * (1.0 - _TOLERANCE))
    pairs = [
        (int(row), counts)
        for row in rows[np.argsort(cuts.bound_s[rows])]
        for counts in _falling(cuts.most[row])
    ]
    for begin in range(0, len(pairs), _MOST_ROWS):
        part = pairs[begin : begin + _MOST_ROWS]
        chosen = np.array([row for row, _ in part])
        every = np.array([counts for _, counts in part])
        bound_s = cuts.lower_bound(problem, chosen, every)
        for index in np.argsort(bound_s, kind="stable"):
            if bound_s[index] >= best.step_s * (1.0 - _TOLERANCE):
                break
            plan = staged(
                cuts.ends[chosen[index]].tolist(),
                cuts.members,
                every[index].tolist(),
                problem.num_micro_batches,
            )
            step_s = simulate_schedule(problem, plan).step_s
            best.num_simulated += 1
            if step_s < best.step_s:
                best.step_s, best.plan = step_s, plan


def _falling(most: Ints) -> Iterator[tuple[int, ...]]:
    """Yield all K of the stages that never rise, within `most`."""
    first, *others = (int(each) for each in most)
    for count in range(1, first + 1):
        if others:
            for rest in _falling(np.minimum(others, count)):
                yield (count, *rest)
        else:
            yield (count,)


def _most_in_flight(
    problem: PipelineProblem, members: tuple[Members, ...], first: Ints, last: Ints
) -> Ints:
    """Return the most K of every stage within memory (F28), which never rises; 0 if none fits."""
    model, found = problem.model, np.full(first.shape, problem.num_micro_batches, np.int64)
    for row in range(len(first)):
        for stage, own in enumerate(members):
            layers = int(first[row, stage]), int(last[row, stage])
            state = model.state_bytes(*layers, problem.optimizer_copies)
            kept = model.kept_bytes(*layers)
            for soc, share in own:
                room = problem.device(soc).memory_bytes * (1.0 + 1e-12) - state
                if room < 0.0:
                    found[row, stage] = 0
                elif kept:
                    most = int(room / (share * kept))
                    found[row, stage] = min(found[row, stage], most)
    return np.minimum.accumulate(found, axis=1)


def _passes(
    problem: PipelineProblem,
    soc: int,
    share: int,
    first: Ints,
    last: Ints,
) -> tuple[Floats, Floats]:
    device = problem.device(soc)
    every = [
        problem.pass_s(device, int(a), int(b), share) for a, b in zip(first, last, strict=True)
    ]
    forward_s, backward_s = np.array(every).reshape(-1, 2).T
    return forward_s, backward_s


def _after(
    problem: PipelineProblem,
    members: Members,
    rank: int,
    first: Ints,
    last: Ints,
) -> Floats:
    """Return the seconds after a device's last pass: its messages in the ring, and the update of weights."""
    prefix, size = problem.model.weight_prefix, len(members)
    weight = prefix[last + 1] - prefix[first]
    soc, following = members[rank][0], members[(rank + 1) % size][0]
    after_s = weight * problem.device(soc).update_s(1.0)
    if size > 1:
        own_s = weight / size / problem.bandwidth(soc, following)
        after_s = np.maximum(after_s, 2.0 * (size - 1) * own_s)
    return after_s


def _transfers(
    problem: PipelineProblem, members: tuple[Members, ...], stage: int, last: Ints
) -> list[tuple[int, int, Floats, Floats]]:
    """Return the seconds of a micro-batch's messages between two stages, each alone on its links."""
    output = problem.model.entering_bytes[last + 1]
    begin = sum(len(own) for own in members[:stage])
    middle = begin + len(members[stage])
    shares = [[share for _, share in own] for own in members[stage : stage + 2]]
    found = []
    for piece in slices_between(*shares):
        source, target = members[stage][piece.sender][0], members[stage + 1][piece.receiver][0]
        message_s = problem.cluster.message_s
        there_s, back_s = (
            piece.num_samples * output * part / problem.bandwidth(*pair) + message_s
            for part, pair in (
                (problem.activation_part, (source, target)),
                (problem.gradient_part, (target, source)),
            )
        )
        found.append((begin + piece.sender, middle + piece.receiver, there_s, back_s))
    return found
