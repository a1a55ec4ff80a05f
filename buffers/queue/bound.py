"""Which versions may make group n, and why no token trained on is older than S steps.

Symbols
    B   groups in one batch (one learner step takes B groups)
    S   max_staleness, in steps
    p   publish_every: version v is published when v steps are done and v is a multiple of p
    W   window: a batch takes the lowest ready numbers. It may pass over a number that is not ready, but only up to W - 1
        live numbers beyond the lowest such one, so that this one can never starve; W = 1 is strict order
    q   dead numbers below n: quarantined, or filtered (see below). They are never consumed, so everything behind them moves
        up; the rest are live

Rule
    A credit for group n is given to an actor only when the weights that actor serves have version at least
        low(n) = max(0, last(n) - S),    last(n) = (n - q + W - 1) div B.

Claim: every token of group n has staleness at most S at the moment it is trained on.
    1. Order. While n is unconsumed the head is at most n, so every number consumed before n is among the n - q live
       ones below n or the W - 1 live ones above it: n is trained at step at most last(n).
    2. Sampling. Versions an actor serves only rise while a group is in flight (going back to an older version, after
       the learner was restored, cancels the groups in flight). The first token has version >= low(n), so all have.
    3. Therefore step - version <= last(n) - low(n) <= S.  A number that dies later only lowers the step.        QED
    An episode's later turns are sampled after its first, so 2 holds for them as it stands, however long an environment takes
    between two turns: no clock enters. Observations were sampled by no version, and bear no loss.
    Strict order is W = 1, where last(n) = (n - q) div B is the step of n itself and, when nothing dies, the bound is
    reached by equality.

Claim: it never deadlocks when S >= p - 1 + ceil((W - 1) / B).
    At step v the newest version is at least v - p + 1. Batch v needs the numbers up to position (v + 1) B - 1; the last
    of them has last(n) = v + (B + W - 2) div B = v + ceil((W - 1) / B), so low(n) <= v + ceil((W - 1) / B) - S <= v - p + 1:
    its credit is available. A smaller S is refused at construction, by `check`.

Three spellings of one inequality. Reverb's rate limiter bounds `inserts * samples_per_insert - samples` at insertion;
AReaL admits while `accepted + running < (S + version + 1) B`; TitanRL holds `(S + 1) B` slots that a published version
frees. With W = 1 and p = 1 the rule above is n < (S + version + 1) B: AReaL's capacity, counted by number instead of
by sum, so that it also bounds each group and not only their total. The window costs TitanRL's `ceil((W - 1) / B)` steps.

Refill: a zero-advantage group may be filtered when it is put; its number dies, and the numbers behind it replace it. So a
batch has B groups whose rewards differ, and nothing above changes: q counts the filtered ones too. Of a batch only the
first R B numbers may be filtered, R being `refills`; what comes behind them enters as it is, so a batch takes at most
(R + 1) B groups to make in strict order, and a run with nothing but such groups goes on (its learner ends it). With S = 0
the batch is a function of the version: all of it is made by version `step`, in the order of numbers, and whether a number is
filtered does not depend on when the others were put.

Exact mode: group n is made by version max(0, step(n) - S) and no other; needs W = 1, p = 1 and no refill: when n is put,
groups below it may still be filtered, so step(n), and with it the version n should have been made by, would depend on
who was faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rlhf.buffers.errors import ConfigError


@dataclass(frozen=True)
class Bound:
    """The arithmetic of one run."""

    groups_per_batch: int
    max_staleness: int
    num_groups: int
    """How many groups may be consumed in all."""
    publish_every: int = 1
    window: int = 1
    exact: bool = False
    refills: int = 0
    """R; 0 filters nothing."""
    numbers: int | None = None
    """How many group numbers there are, when filtered ones are to be replaced; None: as many as groups."""
    coming: bool = False
    """There may be more numbers later. The proof holds: a number that does not exist yet gets no credit, and as long as more
    may come no batch is smaller than B, so that position and step of a number agree."""

    def check(self) -> None:
        """Raise ConfigError for settings under which the run would wait forever, naming the nearest that would not."""
        needed = self.lowest_staleness
        if self.max_staleness < needed:
            raise ConfigError(
                f"queue.max_staleness = {self.max_staleness} would hang: with publish_every = {self.publish_every}, "
                f"window = {self.window} and {self.groups_per_batch} groups per batch the learner would wait for groups "
                f"that no published version may begin. Lowest that can run: queue.max_staleness = {needed}."
            )
        if self.exact and self.refills:
            raise ConfigError(
                "queue.exact = true with advantage.constant_groups = 'refill': which version makes a group would depend on "
                "which of those before it were filtered early. Set advantage.constant_groups = 'drop' or queue.exact = false."
            )
        if self.exact and (self.window != 1 or self.publish_every != 1):
            raise ConfigError(
                f"queue.exact = true needs window = 1 and publish_every = 1 (every version exists and the step of every "
                f"group is known), got window = {self.window}, publish_every = {self.publish_every}."
            )

    @property
    def lowest_staleness(self) -> int:
        """The smallest bound under which this run does not wait forever: p - 1 + ceil((W - 1) / B)."""
        return self.publish_every - 1 + -(-(self.window - 1) // self.groups_per_batch)

    @property
    def num_steps(self) -> int:
        """Most learner steps, the last perhaps with a smaller batch."""
        return -(-self.num_groups // self.groups_per_batch)

    @property
    def num_numbers(self) -> int:
        """How many group numbers there are, filtered ones included."""
        return self.num_groups if self.numbers is None else self.numbers

    def last_step(self, number: int, dead_below: int = 0) -> int:
        """Latest learner step at which group `number` can be trained on."""
        return (number - dead_below + self.window - 1) // self.groups_per_batch

    def lowest_version(self, number: int, dead_below: int = 0) -> int:
        """Lowest version that may sample a token of group `number`."""
        return max(0, self.last_step(number, dead_below) - self.max_staleness)

    def allows(self, version: int, number: int, dead_below: int = 0, target_staleness: int | None = None) -> bool:
        """Whether weights of `version` may begin group `number` (in exact mode: must be exactly the one).

        `target_staleness`: a lower limit than the bound, as far as the run can go on with it; it never allows more.
        """
        within = self.max_staleness
        if target_staleness is not None and not self.exact:
            within = min(within, max(target_staleness, self.lowest_staleness))
        low = max(0, self.last_step(number, dead_below) - within)
        return version == low if self.exact else version >= low

    @property
    def max_ahead(self) -> int:
        """Most groups that can be begun and not yet trained on, whatever actors do: (S + 1) B."""
        return (self.max_staleness + 1) * self.groups_per_batch
