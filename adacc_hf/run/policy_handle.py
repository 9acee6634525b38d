"""Running a model's blocks under a policy.

A block whose plan retains everything is called plainly. Any other call runs inside one pair of saved-tensor hooks,
which carries all actions. A block is recorded at a few sizes, most often by a profile. From then on calls of other
sizes run on tapes whose numbers are evaluated from theirs (`tape/symbolic_tape.py`). A normal step has no dispatch
mode.

NOTE [Rules of the executor]. Code and tests say "rule R3".
R1  Exact: without a lossy codec, loss and every gradient are bit-equal to plain training, dropout included.
R2  A restored tensor has the dtype, size, stride and storage offset of the saved one.
R3  One storage, one payload, however many operators save it.
R4  Parameters and casts of parameters are never compressed. A cast may be recomputed. What backward divides by is never
    compressed with loss.
R5  Random operators are replayed from the state that the default generator was in, and the generator is put back as it
    was, so that training draws what plain training draws. A plan shows no operator to Python, so a call takes the state
    where autograd saves the last tensor before the operator, or where the call begins; that nothing was drawn in
    between is compared (rule R7). What an autograd Function draws may follow from its data: it is replayed from exact
    data alone (rule R14). What else may follow from data (`bernoulli` of probabilities), what is drawn from
    another generator, and what follows a draw with nothing saved between, is never replayed: its result is retained or
    stored losslessly. Of dropout only the mask is random, and of its input the mask needs no element. Fused attention
    drops by its sizes alone.
R6  An in-place operator makes a new version of a storage; replay never changes a version that something else needs.
    Nor does the backward of an autograd function written in Python: what replay reads again, it gets as a copy.
R7  Nothing is replayed that was not compared with the original, bit for bit, at each of the sizes that a block was
    recorded at: three or more, odd ones and multiples of 8 among them. A size that was not compared runs the same
    operators, with inputs of the same layout, on the same device; what could differ is the kernel that a library picks
    for the size. So replay is compared again at the 1st, 2nd, 4th, 8th ... new size, on the first block that runs it,
    each operator as soon as it has run, which takes the memory of one operator's results. What differs is logged, and
    retained at all sizes. Convolutions whose kernel cuDNN chooses by time (`torch.backends.cudnn.benchmark`) are not
    replayed: in backward's thread it may choose another. An autograd Function whose kernels write unseen is one
    operator, and its forward runs again (tape/function_recording.py). Torch's checkpoint may run a block again only if
    all of it came out alike (`verification.runs_alike`), or if nothing of it can be replayed.
R8  A call runs as a tape says only if something vouches for it. Dynamo's guards do (`tape/guards.py`): they hold if the
    Python of the call takes the traced path, whatever that depends on. The call's key adds what guards leave out: the
    numbers that are inputs of the traced graph, offsets and shared storages of the arguments. What hangs on the block
    has to lie where the tape has it; otherwise the call is another shape, recorded by itself. A block that Dynamo
    cannot trace whole is validated at each call: every operator is compared with the tape before it runs
    (`run/validation.py`). So are the second call of each tape, few after it, and the first call at some new sizes. A
    call that leaves its tape keeps everything from there on, and stays exact. Each call compares what autograd saves
    with the tape. Few whole numbers in an argument that the block reads into Python are sizes, other data has tapes of
    its own, and where operators depend on any other data torch's checkpoint takes over. So does it at a call unlike any
    recorded one that the budget has no room to record.
R9  Without gradients, in generate(), after an exception, with retain_graph or create_graph, and with several forwards
    before one backward: right, or refused, and nothing is left behind. Each call of a block has a plan of its own, and
    is right under that of any other call too.
R10 A normal step never waits for the device.
R11 A packed object never holds the tensor object itself, and all state lives in packed objects and calls.
R12 Inputs, parameters, buffers and what else hangs on the block are looked up anew at each call. What is reached in
    any other way cannot be replayed from.
R13 Operators that other ranks take part in are never replayed, so that no rank waits for one whose plan differs: their
    result is retained or compressed. Where torch's checkpoint must run such a block, it does so under every plan.
R14 Indices that follow from what is stored with loss (an expert's tokens, an order of rows) are never replayed. Nor are
    statistics of its rows (a norm's): they are stored beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from adacc_hf.artifacts.call_names import block_of_call, call_name, num_calls
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import ChunkedHeadError, PolicyMismatchError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.head.head import ChunkedHead
from adacc_hf.run.block_executor import BlockExecutor
from adacc_hf.run.blocks import Checkpointed, Installation
from adacc_hf.run.larger_batches import LargerBatches
from adacc_hf.tape.tape_cache import TapeCache, library_of_profiles

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile


@dataclass(frozen=True, slots=True)
class BlockPlans:
    """A policy made ready to run: a strategy for every block, by name."""

    policy: Policy
    strategies: dict[str, BlockExecutor]


class PolicyHandle:
    """A policy applied to a model. `remove()`, or leaving it as a context manager, takes it off without a trace."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        block_classes: tuple[str, ...] | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.installation = Installation(model, block_classes)
        self._block_classes = block_classes
        self.library = TapeCache()
        self.library.take(library_of_profiles(model))
        if profile is not None:  # of another process: this one has no tapes of it
            self.library.expect_orders(profile.kinds)
        self.policy = policy
        self.plans: BlockPlans
        """The strategies that were followed last."""
        self._head: ChunkedHead | None = None
        self.larger_batches: LargerBatches | None = None
        """Warns of a batch larger than the policy was made for. None if each size has a policy of its own."""
        try:
            self.follow(self.prepare(policy))
        except BaseException:
            self.remove()
            raise

    def replace(self, policy: Policy) -> None:
        """Follow another policy from the next forward on."""
        self.follow(self.prepare(policy, self.plans))
        if self.larger_batches is not None:
            self.larger_batches.remove()
            self.larger_batches = LargerBatches(self.installation.model, policy)

    def prepare(self, policy: Policy, earlier: BlockPlans | None = None) -> BlockPlans:
        """The strategies of `policy`, to be followed at any time; they know the shapes that `earlier` has seen."""
        _check_blocks(policy, list(self.installation.blocks), type(self.installation.model).__name__)
        known = {} if earlier is None else earlier.strategies
        strategies = {}
        for name, index in policy.blocks:
            before = (known[name].known, known[name].entries.programs()) if name in known else ()
            strategies[name] = BlockExecutor(name, policy.plans[index], self.library, *before)
        return BlockPlans(policy, strategies)

    def follow(self, plans: BlockPlans | None) -> None:
        """Run the blocks under `plans` from the next forward on; under torch's own checkpoint if None."""
        self.installation.expect(self.installation.functions if plans is None else plans.strategies)
        for name, function in self.installation.functions.items():
            function.strategy = Checkpointed() if plans is None else plans.strategies[name]
        if plans is not None:  # else the head stays: no size of batch is safer with a plain one
            self._chunk_head(plans.policy.head == "chunked")
            self.plans, self.policy = plans, plans.policy

    def _chunk_head(self, is_on: bool) -> None:
        if self._head is None and is_on:
            try:
                self._head = ChunkedHead(self.installation.model)
            except ChunkedHeadError as error:
                raise PolicyMismatchError(f"the policy has a chunked head, and {error}") from error
        if self._head is not None:
            self._head.is_on = is_on

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """The model without this handle, for a profile in the middle of a run; afterwards all is as before."""
        before, head = self.installation, self._head
        self._take_off()
        self._head = None
        try:
            yield
        finally:
            self.library.take(library_of_profiles(before.model))
            self.installation = Installation(before.model, self._block_classes)
            self.installation.expect(before.functions)
            self._chunk_head(head is not None and head.is_on)
            for name, function in self.installation.functions.items():
                function.strategy = before.functions[name].strategy
            for name, block in self.installation.blocks.items():
                block.num_calls = before.blocks[name].num_calls

    def remove(self) -> None:
        """Take the policy off the model. Harmless when it is off already."""
        Applied.forget(self.installation.model, self)
        if self.larger_batches is not None:
            self.larger_batches.remove()
        self._take_off()

    def _take_off(self) -> None:
        self.installation.remove()
        if self._head is not None:
            self._head.remove()

    def uncalled(self) -> list[str]:
        """Blocks whose function was never called with gradients on: something replaced their forward."""
        return self.installation.uncalled()

    def __enter__(self) -> PolicyHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


APPLIED = "_adacc_applied"
"""The attribute of a model that leads to its policy's handle, or to its session."""


class Applied:
    """Leads from a model to what has put a policy on it. A copy leads nowhere: a copy of a model has no policy."""

    def __init__(self, owner: Any = None, remove: Callable[[], object] | None = None) -> None:
        self.owner, self.remove = owner, remove

    @staticmethod
    def forget(model: nn.Module, owner: object) -> None:
        """Have `model` lead to `owner` no more. Harmless if it leads elsewhere."""
        applied = model.__dict__.get(APPLIED)
        if applied is not None and applied.owner is owner:
            del model.__dict__[APPLIED]

    def __reduce__(self) -> tuple[Any, ...]:
        return Applied, ()


def apply_policy(model: nn.Module, policy: Policy, config: AdaccConfig | None = None) -> PolicyHandle:
    """Run the blocks of `model` under `policy` from the next forward with gradients on.

    Removes the policy that an earlier `apply_policy` has applied to `model`. Only `config.block_classes` is read of the
    config. A batch larger than the one that `policy` was made for is warned of once, with its predicted peak.

    Raises PolicyMismatchError if the policy was made for other blocks, or has a chunked head that the model
    does not allow; NoBlocksError if Adacc finds no blocks in the model; NestedHooksError if modules are wrapped for
    activation checkpointing. Each block's first call is recorded: it raises PolicyMismatchError if its operators differ
    from those in the profile, and NestedHooksError within other saved-tensor hooks.
    """
    remove_policy(model)
    handle = PolicyHandle(model, policy, config.block_classes if config else None)
    handle.larger_batches = LargerBatches(model, policy)
    model.__dict__[APPLIED] = Applied(handle, handle.remove)
    return handle


def remove_policy(model: nn.Module) -> bool:
    """Remove the policy that `apply_policy` has applied to `model`, or the AdaccSession that was begun on it.

    Return False if there was none.
    """
    applied = model.__dict__.get(APPLIED)
    if applied is None or applied.remove is None:
        return False
    applied.remove()
    return True


def _check_blocks(policy: Policy, blocks: list[str], model_class: str) -> None:
    """Compare names, not their order: blocks are called in forward order and installed in module order (CLIP)."""
    named = [name for name, _ in policy.blocks]
    calls = num_calls(named)
    expected = sorted(call_name(block, i + 1) for block, number in calls.items() for i in range(number))
    if expected == sorted(named) and calls.keys() == set(blocks):
        return
    missing = [name for name in (*blocks, *expected) if name not in named]
    foreign = [name for name in named if block_of_call(name) not in blocks]
    raise PolicyMismatchError(
        f"the policy is for {len(calls)} blocks, {model_class} has {len(blocks)}"
        + (f"; it has no plan for {missing[0]}" if missing else "")
        + (f"; the model has no {foreign[0]}" if foreign else "")
        + ": profile this model and solve a policy for it"
    )
