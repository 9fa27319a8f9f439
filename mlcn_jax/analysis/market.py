"""Every way to train a model on the machines of a catalog, and what it takes and costs."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from mlcn_jax.analysis.ways import Choice, Task, Terms, Way
from mlcn_jax.distributed.mesh import check_split
from mlcn_jax.errors import InputError
from mlcn_jax.placement import cost, rental, simulate
from mlcn_jax.placement.catalog import Offer
from mlcn_jax.placement.heuristics import HEURISTICS
from mlcn_jax.placement.interval import Interval, around
from mlcn_jax.placement.partition import partition
from mlcn_jax.placement.problem import NoRoom, Placement
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.placement.spot import Interruptions
from mlcn_jax.training import splits
from mlcn_jax.training.accumulate import check_parts

_FREE = simulate.Link(0.0, math.inf)
_MOST_INTERRUPTIONS = 60.0  # of a machine per hour
_PARETO_POINTS = 5  # ways with lanes trained apart
_EARLIER = 0.8  # each further deadline, relative to the time of the way before
_MOST_SETS = 10**6  # sets of machines
_EXACT_SECONDS = 1.0  # for one integer program
_FAST_PARTITIONERS = [name for name in HEURISTICS if name != "random"]


class Market:
    """The choices for one task, and the ways to train it on them.

    Args:
      task, terms: what is trained and on what terms.
      offers: offers, each with its device profile and the file of the profile.

    Attributes:
      choices: the offers that can be part of a cheapest way.
      passed: why offers were passed over: their profiles were measured with other lanes or images.

    Raises:
      InputError: all were passed over.
    """

    def __init__(self, task: Task, terms: Terms, offers: Sequence[tuple[Offer, DeviceProfile, str]]):
        self.task, self.terms = task, terms
        self._costs = [cost.cost_of(task.spec, group.spec) for group in task.spec.lane_groups]
        self.counts = [group.count for group in task.spec.lane_groups]
        profiles = {id(profile): profile for _, profile, _ in offers}
        obstacles = {key: told for key, profile in profiles.items() if (told := self._obstacle(profile))}
        unfit = [f"{offer.machine}: {file}: {obstacles[id(p)]}" for offer, p, file in offers if id(p) in obstacles]
        self.passed = list(dict.fromkeys(unfit))
        choices = [self._choice(*entry) for entry in offers if id(entry[1]) not in obstacles]
        if not choices:
            reasons = "\n".join(f"  {reason}" for reason in self.passed)
            raise InputError(f"no machine has a profile that was measured with these lanes:\n{reasons}")

        def alike(k: int, n: int) -> bool:
            return choices[k].covers(choices[n]) and choices[k].offer.place == choices[n].offer.place

        kept = rental.undominated([c.machine for c in choices], alike, terms.most_machines)
        self.choices = [choices[n] for n in kept]
        self._speed = lru_cache(maxsize=None)(self._whole_seconds)
        self._least = lru_cache(maxsize=None)(self._least_kind_seconds)
        self._splits_of: dict[tuple, list[_Split]] = {}

    def ways(self, deadline_seconds: float = math.inf) -> list[Way]:
        """The ways that no other beats in both time and cost, fastest first, with the cheapest by the deadline."""
        return rental.front([*self._together(), *self._apart(deadline_seconds)])

    def _obstacle(self, profile: DeviceProfile) -> str:
        """Why a profile cannot predict the lanes, in one line; empty if it can."""
        try:
            for one in self._costs:
                profile.lane_seconds(one, self.task.batch_size)
                profile.lane_bytes(one, self.task.batch_size)
        except InputError as error:
            return " ".join(str(error).split())
        return ""

    def _choice(self, offer: Offer, profile: DeviceProfile, file: str) -> Choice:
        terms = self.terms

        def given(value: float | None, default: float) -> float:
            return default if value is None else value

        startup = given(offer.startup_seconds, terms.startup_seconds)
        startup += self.task.data_bytes / terms.download_bytes_per_second
        rate = given(offer.interruptions_per_hour, terms.interruptions_per_hour or 0.0) if offer.spot else 0.0
        if rate > _MOST_INTERRUPTIONS:
            raise InputError(
                f"{offer.machine}: {rate:g} interruptions per hour are more than one a minute, with which nothing "
                "can be trained: give a lower rate"
            )
        machine = rental.Machine(
            price=offer.price,
            startup_seconds=startup,
            minimum_seconds=given(offer.minimum_seconds, terms.minimum_seconds),
            available=offer.available,
            pool=offer.row,
        )
        return Choice(offer, profile, file, machine, Interruptions(rate / 3600, startup, terms.checkpoint_seconds))

    # Machines that train one run together.

    def _together(self) -> list[Way]:
        """Ways on the Pareto front, over sets of machines; sets that cannot be on it are skipped without a solution.

        The machines of a set are in one place, since only one link is given.
        """
        machines = [choice.machine for choice in self.choices]
        most = self.terms.most_machines if self.terms.link else 1
        places: dict[tuple[str, str], list[int]] = {}
        for n, choice in enumerate(self.choices):
            places.setdefault(choice.offer.place, []).append(n)
        count = sum(math.comb(len(own) + n - 1, n) for own in places.values() for n in range(1, most + 1))
        if count > _MOST_SETS:
            raise InputError(
                f"--most_machines={most} of {len(machines)} different offers give {count:,} sets of machines, but only "
                f"{_MOST_SETS:,} can be tried: lower --most_machines, or leave offers out of the catalog"
            )
        bounded = []
        for chosen in itertools.chain.from_iterable(rental.sets(machines, most, own) for own in places.values()):
            least = self._least_seconds(chosen)
            bounded.append((sum(machines[n].cost(least) for n in chosen), least, chosen))
        found: list[Way] = []
        for least_cost, least, chosen in sorted(bounded):
            if any(way.cost <= least_cost and way.seconds <= least for way in found):
                continue
            found = rental.front([*found, *self.on(chosen)])
        return found

    def _least_seconds(self, chosen: tuple[int, ...]) -> float:
        """Seconds that no split over these machines can beat, even one that divides lanes.

        Some machines take a smaller part of their time for a kind of lane than others: its least part counts, as in
        `problem.lower_bound_seconds`. All parts add up to 1 where machines differ by one factor.
        """
        rate = sum(self.choices[n].offer.devices / self._least(n)[0] for n in chosen)
        work = sum(map(min, zip(*(self._least(n)[1] for n in chosen), strict=True)))
        started = max(self.choices[n].machine.startup_seconds for n in chosen)
        return started + self.task.steps * self.task.step_share * work / rate

    def _whole_seconds(self, number: int) -> float:
        """A step of all lanes on one device of a machine."""
        return sum(self._kind_seconds(number))

    def _least_kind_seconds(self, number: int) -> tuple[float, list[float]]:
        """The least seconds of a step of all lanes on one device, and the part of it that all lanes of each kind take.

        The batch may be computed in equal shares: those that some devices have can take faster convolution algorithms.
        """
        most = max(choice.offer.devices for choice in self.choices) * self.terms.most_machines
        shares = (n for n in range(1, most + 1) if self.task.batch_size % n == 0)
        least = list(map(min, zip(*(self._kind_seconds(number, n) for n in shares), strict=True)))
        return sum(least), [seconds / sum(least) for seconds in least]

    def _kind_seconds(self, number: int, shares: int = 1) -> list[float]:
        profile, batch = self.choices[number].profile, self.task.batch_size
        images = batch * sum(self.counts)
        kinds = zip(self._costs, self.counts, strict=True)
        return [shares * count * profile.model_seconds([one], batch // shares, images) for one, count in kinds]

    def on(self, chosen: tuple[int, ...]) -> list[Way]:
        """Every split that trains one run together on a set of machines, given by the numbers of their choices.

        The fastest machine comes first: its first device computes loss and decoder in stacks. A single machine also
        trains it on fewer of its devices.
        """
        chosen = tuple(sorted(chosen, key=self._speed))
        alike = tuple(
            (id(c.profile), c.offer.devices, c.offer.memory_bytes) for c in map(self.choices.__getitem__, chosen)
        )
        if alike not in self._splits_of:  # prices and starts do not matter to it
            self._splits_of[alike] = self._splits(chosen)
        return [self._way(chosen, split) for split in self._splits_of[alike]]

    def _splits(self, chosen: tuple[int, ...]) -> list["_Split"]:
        devices = [self.choices[n].devices for n in chosen]
        if len(chosen) > 1:
            return self._splits_over(chosen, devices)
        counts = range(1, len(devices[0]) + 1)
        return [split for count in counts for split in self._splits_over(chosen, [devices[0][:count]])]

    def _splits_over(self, chosen: tuple[int, ...], devices: Sequence[Sequence[DeviceProfile]]) -> list["_Split"]:
        task, spec, messages = self.task, self.task.spec, self.task.messages
        profiles = [profile for own in devices for profile in own]
        hosts = [host for host, own in enumerate(devices) for _ in own]
        within: dict[int | str, simulate.Link] = {h: self._inside(n) for h, n in enumerate(chosen)}
        cluster = simulate.Cluster(hosts, within, self.terms.link or _FREE)
        count, ones = len(profiles), [1.0] * len(profiles)
        found = []

        def add(step: simulate.StepTime, data: int, lane: int, placement: Placement | None = None) -> None:
            sure = splits.interval(step.total_seconds, spec, profiles, placement=placement, cluster=cluster)
            found.append(_Split(step.total_seconds, sure, profiles[0].forward_share, data, lane, placement))

        for data in (n for n in range(1, count + 1) if count % n == 0):
            lane = count // data
            with contextlib.suppress(InputError):
                check_split(spec, task.batch_size, data, lane)
                check_parts(spec, task.batch_size, data, messages.parts)
                share, parts = task.batch_size // data, messages.parts
                if all(splits.has_room(spec, share, lane, profile, parts) for profile in profiles):
                    step = splits.predict_mesh(spec, task.batch_size, data, lane, profiles, ones, cluster, messages)
                    add(step, data, lane)
        in_one_process = len(chosen) == 1 and self.choices[chosen[0]].processes(count) == 1
        exchange = "direct" if in_one_process else "ring"
        stacked = count > 1 and splits.can_stack(spec, messages)
        for placement in self._placements(profiles) if stacked else ():
            args = (placement, profiles, ones, exchange, cluster, messages)
            add(splits.predict_stacks(spec, task.batch_size, *args), 1, count, placement)
        return found

    def _inside(self, number: int) -> simulate.Link:
        link = self.choices[number].profile.link
        return simulate.Link(**link) if link else _FREE

    def _placements(self, profiles: Sequence[DeviceProfile]) -> list[Placement]:
        """The placements that a run can be told to make, by naming a partitioner, with a lane on each device.

        One of them computes fastest; over a slow link, one with fewer lanes on its fullest device may be faster:
        that device decides how much is sent.
        """
        if len(profiles) > len(self.task.spec.lane_specs):
            return []
        names = [str(d) for d in range(len(profiles))]
        problem = splits.placement_problem(self.task.spec, self.task.batch_size, profiles, names)
        found = splits.placements(problem, _FAST_PARTITIONERS)
        if not any(placement.optimal for placement in found):
            with contextlib.suppress(NoRoom):
                found.append(partition("exact", problem, time_limit_seconds=_EXACT_SECONDS))
        return [placement for placement in found if len(set(placement.device_of)) == len(profiles)]

    def _way(self, chosen: tuple[int, ...], split: "_Split") -> Way:
        choices = [self.choices[n] for n in chosen]
        started = max(choice.machine.startup_seconds for choice in choices)
        per_second = sum(choice.interruptions.per_second for choice in choices)
        interruptions = Interruptions(per_second, started, self.terms.checkpoint_seconds)
        run = self._run(split.seconds, split.forward_share, interruptions)
        seconds = started + run.seconds
        return Way(
            kind="stacks" if split.placement else "mesh",
            machines=chosen,
            seconds=seconds,
            cost=sum(choice.machine.cost(seconds) for choice in choices),
            step_seconds=split.seconds * self.task.step_share,
            interval=_of_run(split.interval, split.seconds, started, run.seconds),
            save_every=run.save_every,
            interruptions=per_second * seconds,
            lost_seconds=run.lost_seconds,
            data=split.data,
            lane=split.lane,
            placement=split.placement,
        )

    def _run(self, step_seconds: float, forward_share: float, interruptions: Interruptions) -> "_Run":
        task = self.task
        forward_seconds = forward_share * step_seconds / task.batch_size  # of an image at full size
        step_seconds *= task.step_share
        work = task.steps * step_seconds + task.scored_images * forward_seconds
        validating = (task.validation_images + task.calibration_images) * forward_seconds
        saving = interruptions.checkpoint_seconds + validating
        interruptions = dataclasses.replace(interruptions, checkpoint_seconds=saving)
        every = min(task.save_every, task.steps)
        if interruptions.per_second:
            every = min(task.steps, max(1, round(interruptions.best_interval() / step_seconds)))
        interval = every * step_seconds
        return _Run(every, interruptions.expected_seconds(work, interval), interruptions.lost_seconds(interval))

    # Lanes trained apart.

    def _apart(self, deadline_seconds: float) -> list[Way]:
        """Ways with lanes trained apart: the fastest, the cheapest by the deadline and of all, and some in between."""
        task = self.task
        if not task.apart or len(task.spec.lane_specs) < 2:
            return []
        own, most = [choice.machine for choice in self.choices], self.terms.most_machines
        # Wherever they are: they send each other nothing.
        numbers = rental.undominated(own, lambda k, n: self.choices[k].covers(self.choices[n]), most)
        runs = {n: [self._lane_run(self.choices[n], one) for one in self._costs] for n in numbers}
        machines = [dataclasses.replace(own[n], lane_seconds=tuple(run.seconds for run in runs[n])) for n in numbers]
        given = (machines, self.counts, most)
        answers = [rental.apart(*given, math.inf, _EXACT_SECONDS, fastest=True)]
        for start in dict.fromkeys((deadline_seconds, math.inf)):
            deadline = start
            for _ in range(_PARETO_POINTS if start == math.inf else 1):
                answers.append(rental.apart(*given, deadline, _EXACT_SECONDS))
                if answers[-1] is None:
                    break
                deadline = _EARLIER * answers[-1].seconds
        found = [answer for answer in answers if answer is not None]
        return [self._apart_way(answer, [(numbers[n], held) for n, held in answer.rented], runs) for answer in found]

    def lane_save_every(self, number: int, kind: int) -> int:
        """Steps between the checkpoints of a lane of a kind that a machine trains apart."""
        return self._lane_run(self.choices[number], self._costs[kind]).save_every

    def _lane_run(self, choice: Choice, one: cost.LaneCost) -> "_Run":
        profile = choice.devices[0]
        needed = splits.needed_bytes(self.task.spec, [one], self.task.batch_size, profile, self.task.messages.parts)
        if needed > profile.memory_bytes:
            return _Run(1, math.inf, 0.0)
        step = self._lane_step(profile, one)
        run = self._run(step, profile.forward_share, choice.interruptions)
        return run  # on one of the machine's devices

    def _lane_step(self, profile: DeviceProfile, one: cost.LaneCost) -> float:
        return profile.model_seconds([one], self.task.batch_size) + profile.head_seconds(1, self.task.batch_size)

    def _apart_way(
        self, answer: rental.Apart, rented: Sequence[tuple[int, tuple[int, ...]]], runs: dict[int, list["_Run"]]
    ) -> Way:
        chosen = tuple(n for n, _ in rented)
        lanes = tuple(held for _, held in rented)
        longest = max(
            (
                (self._lane_step(self.choices[n].profile, one), n, k)
                for n, held in rented
                for k, (one, count) in enumerate(zip(self._costs, held, strict=True))
                if count
            ),
        )
        step, number, kind = longest
        lost = [runs[n][k].lost_seconds for n, held in rented for k, count in enumerate(held) if count]
        interval = around(1.0, [self.choices[n].profile for n in chosen], [[(kind, 1.0)]] * len(chosen))
        started = max(self.choices[n].machine.startup_seconds for n in chosen)

        def rented_seconds(n: int, held: Sequence[int]) -> float:
            """Seconds for which a machine is rented; each is given back when its own lanes have ended."""
            work = sum(count * runs[n][k].seconds for k, count in enumerate(held) if count)
            return self.choices[n].machine.startup_seconds + work

        return Way(
            kind="apart",
            machines=chosen,
            seconds=answer.seconds,
            cost=answer.cost,
            step_seconds=step * self.task.step_share,
            interval=_of_run(interval, 1.0, started, answer.seconds - started),
            save_every=runs[number][kind].save_every,
            interruptions=sum(self.choices[n].interruptions.per_second * rented_seconds(n, held) for n, held in rented),
            lost_seconds=max(lost),
            lanes=lanes,
        )


@dataclasses.dataclass(frozen=True)
class _Split:
    """A split over some devices, and the seconds of its step."""

    seconds: float
    interval: Interval | None
    forward_share: float
    data: int
    lane: int
    placement: Placement | None


@dataclasses.dataclass(frozen=True)
class _Run:
    """Steps between checkpoints, expected seconds of the whole run, and those that an interruption undoes."""

    save_every: int
    seconds: float
    lost_seconds: float


def _of_run(interval: Interval | None, step: float, started: float, seconds: float) -> Interval | None:
    """The interval of a run's seconds, from that of its step."""
    if interval is None:
        return None
    low, high = (started + seconds * end / step for end in (interval.low_seconds, interval.high_seconds))
    return Interval(low, high, interval.level)
