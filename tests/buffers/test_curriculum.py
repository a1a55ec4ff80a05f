"""A curriculum's laws: no prompt too often, none that is retired again, none that starves, and the same again from the file."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.config import CurriculumConfig
from async_rlhf.buffers.curriculum import FILE_NAME, Order, Outcome, Pools, pass_rate, point
from async_rlhf.buffers.errors import ConfigError, DamagedError, JournalError
from tests.simulation.disk import HubKilledError, MemoryDisk

SHARES = st.sampled_from([(0.5, 0.1), (0.2, 0.3), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.25, 0.75)])
RATES = st.sampled_from([0.0, 0.25, 0.5, 1.0, None])


def curriculum(shares: tuple[float, float] = (0.5, 0.1), retire_after: int = 2) -> CurriculumConfig:
    return CurriculumConfig(reward="exact", new_share=shares[0], hard_share=shares[1], retire_after=retire_after)


class Draws:
    """Numbers that are given their places one after the other; how each went is known `late` numbers later."""

    def __init__(self, config: CurriculumConfig, rates: dict[int, list[float | None]], max_uses: int | None, late: int) -> None:
        self.pools, self.rates, self.late = Pools(config, max_uses), rates, late
        self.pools.num_known = len(rates)
        self.chosen: list[int] = []
        self.learned: list[tuple[int, float | None]] = []
        self.learned_at: list[int] = []

    def draw(self) -> bool:
        number = len(self.chosen)
        if number >= self.late and len(self.learned) <= number - self.late:
            self.learn()
        if (place := self.pools.choose(number)) is None:
            return False
        self.pools.use(place)
        self.chosen.append(place)
        return True

    def learn(self) -> None:
        """The oldest that nothing is known of; its rate depends on how often its place has been judged."""
        place = self.chosen[len(self.learned)]
        of_place = self.rates[place]
        rate = of_place[sum(other == place for other, _ in self.learned) % len(of_place)]
        self.learned.append((place, rate))
        self.learned_at.append(len(self.chosen))
        self.pools.learn(place, rate)


@settings(max_examples=300)
@given(
    st.dictionaries(st.integers(0, 11), st.lists(RATES, min_size=1, max_size=4), min_size=1).map(
        lambda found: dict(enumerate(found.values()))
    ),
    SHARES,
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(1, 9),
)
def test_no_place_comes_more_often_than_it_may_and_none_that_is_retired_again(
    rates: dict[int, list[float | None]], shares: tuple[float, float], retire_after: int, max_uses: int | None, late: int
) -> None:
    draws = Draws(curriculum(shares, retire_after), rates, max_uses, late)
    while len(draws.chosen) < 150 and draws.draw():
        pass
    easy, retired_at = dict.fromkeys(rates, 0), dict[int, int]()
    for (place, rate), at in zip(draws.learned, draws.learned_at, strict=True):
        easy[place] = easy[place] + 1 if rate == 1.0 else easy[place] if rate is None else 0
        if easy[place] == retire_after:
            retired_at.setdefault(place, at)
    assert max_uses is None or max(map(draws.chosen.count, rates)) <= max_uses
    for place, at in retired_at.items():
        assert place not in draws.chosen[at:], "a retired place does not come back"
    assert draws.pools.describe()["retired"] == len(retired_at)
    if len(draws.chosen) < 150:
        used_up = {place for place in rates if max_uses is not None and draws.chosen.count(place) == max_uses}
        assert used_up | retired_at.keys() == rates.keys(), "the end comes when none may come any more"


@settings(max_examples=60)
@given(
    st.integers(1, 30), st.sampled_from([(0.5, 0.1), (0.3, 0.05), (0.34, 0.33)]), st.integers(1, 40), st.integers(0, 1 << 60)
)
def test_each_place_that_is_not_retired_comes_in_a_bound(size: int, shares: tuple[float, float], late: int, seed: int) -> None:
    rng = Random(seed)
    rates: dict[int, list[float | None]] = {place: [rng.choice((0.0, 0.5))] for place in range(size)}
    draws = Draws(curriculum(shares), rates, None, late)
    for _ in range(1500):
        draws.draw()
    longest = 3 * size / min(*shares, 1 - sum(shares)) + late
    for place in rates:
        at = [number for number, other in enumerate(draws.chosen) if other == place]
        assert max(b - a for a, b in zip([0, *at], [*at, 1500], strict=True)) <= longest


def test_consecutive_numbers_visit_every_interval_within_three_over_its_length() -> None:
    for length in (0.5, 0.3, 0.1, 0.05, 0.01):
        for begin in (0.0, 0.123, 1 - length):
            for first in (0, 1 << 40):
                at = [n for n in range(2000) if begin <= point(first + n) < begin + length]
                assert max(b - a for a, b in zip([0, *at], [*at, 2000], strict=True)) <= 3 / length


def test_new_places_get_their_share_hard_ones_theirs_and_those_between_the_rest() -> None:
    rates: dict[int, list[float | None]] = {place: [(0.0, 0.5)[place % 2]] for place in range(1000)}
    draws = Draws(curriculum((0.5, 0.1)), rates, None, 8)
    for _ in range(1000):
        draws.draw()
    again = [place for number, place in enumerate(draws.chosen) if place in draws.chosen[:number]]
    assert abs(len(draws.chosen) - len(again) - 500) < 15
    assert abs(sum(place % 2 == 0 for place in again) - 100) < 15
    assert draws.pools.describe()["hard"] == pytest.approx(250, abs=10)


def test_a_pass_rate_is_of_the_members_with_a_value() -> None:
    assert pass_rate([1.0, 0.5, "timed out", None, 2.0], 1.0) == pytest.approx(2 / 3)
    assert pass_rate(["timed out", None], 1.0) is None


# -- the file --------------------------------------------------------------------------------------------------------

BATCH, SIZE = 3, 10


def outcome(number: int) -> Outcome:
    """As good as drawn, and the same whenever it is asked for."""
    return number, Random(number).choice((0.0, 0.5, 1.0, 1.0, None))


def steps(order: Order, until: int) -> None:
    """What a hub does: batches of the lowest numbers, one filtered of every second."""
    while order.num_steps < until:
        step = order.num_steps
        order.append((step + 2) * BATCH, SIZE)
        if step % 2:
            order.append((step + 2) * BATCH, SIZE, [outcome(step * BATCH)])
        order.append((step + 3) * BATCH, SIZE, map(outcome, range(step * BATCH, (step + 1) * BATCH)), step)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(["kill", "power", "full"]), st.integers(0, 40)), max_size=6), st.integers(0, 1 << 30))
def test_whatever_dies_when_each_number_keeps_its_place_and_the_order_is_that_of_a_hub_that_never_died(
    faults: list[tuple[str, int]], seed: int
) -> None:
    disk, directory = MemoryDisk(Random(seed)), Path("/run/data")
    whole = Order(Path("/other"), curriculum(), files=MemoryDisk(Random(0)))
    steps(whole, 12)
    promised: list[int] = []
    order: Order | None = None
    for kind, amount in [*faults, ("calm", 0)]:
        disk.fuse = None if kind in ("full", "calm") else amount
        disk.full = kind == "full"
        try:
            with suppress(OSError, JournalError):
                order = order or Order(directory, curriculum(), files=disk)
                steps(order, 12 if kind == "calm" else min(12, order.num_steps + 3))
        except HubKilledError:
            order = None if order is None else _left(order, promised)
            if kind == "power":
                disk.crash()
        disk.fuse, disk.full = None, False
        if order is not None:
            promised = _kept(order, promised)
    assert order is not None
    assert _kept(order, promised) == [whole.place(number) for number in range(whole.num_numbers)]
    assert order.describe() == whole.describe()


def _kept(order: Order, promised: list[int]) -> list[int]:
    found = [order.place(number) for number in range(order.num_numbers)]
    assert found[: len(promised)] == promised, "what was credited stays as it was"
    return found


def _left(order: Order, promised: list[int]) -> None:
    promised[:] = _kept(order, promised)


def test_an_outcome_counts_once_for_a_number_and_filtered_ones_with_the_next_batch(tmp_path: Path) -> None:
    with closing(Order(tmp_path, curriculum(retire_after=2))) as order:
        order.append(4, 4)
        order.append(4, 4, [(0, 1.0)])
        assert order.describe()["pass_rate"] == 0.0, "it waits for the batch"
        order.append(4, 4, [(0, 1.0)])
        order.append(4, 4, [(0, 1.0), (1, 0.0)], 0)
        assert order.describe() == {"places": 4, "new": 0, "retired": 0, "hard": 1, "pass_rate": 0.5}
        order.append(4, 4, [(1, 1.0)], 1)
        assert order.describe()["hard"] == 1 and order.not_judged_below(9) == [2, 3]
    with closing(Order(tmp_path, curriculum(retire_after=1))) as again:
        assert again.describe()["retired"] == 1, "what is judged anew are the outcomes, by the settings in force"
        assert [again.place(number) for number in range(4)] == [0, 1, 2, 3]


def test_a_torn_line_is_cut_off_and_a_damaged_one_named(tmp_path: Path) -> None:
    with closing(Order(tmp_path, curriculum())) as order:
        steps(order, 3)
        known = order.num_numbers
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    assert [json.loads(line)["step"] for line in whole.splitlines()] == [None, 0, None, 1, 2]
    for torn in (whole[:-3], whole + b'{"step":4', whole + bytes(20), whole[:-9] + bytes(8) + b"\n"):
        path.write_bytes(torn)
        with closing(Order(tmp_path, curriculum())) as again:
            assert again.num_numbers == (known if torn.startswith(whole) else known - BATCH)
        assert whole.startswith(path.read_bytes())
    path.write_bytes(whole.replace(b'"step":0', b'"step" 0'))
    with pytest.raises(DamagedError, match=r"order.jsonl is damaged at byte \d+\. Restore it"):
        Order(tmp_path, curriculum())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"new_share": 0.4}, 'name the one that decides what is solved: data.curriculum.reward = "..."'),
        ({"reward": "exact", "new_share": 0.8, "hard_share": 0.3}, "is more than all groups; highest new_share: 0.7"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CurriculumConfig.model_validate(given).check()
    CurriculumConfig().check()
