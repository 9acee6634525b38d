"""Execution of a model's blocks under a policy.

A block whose plan retains everything is called plainly. Any other call runs inside one pair of saved-tensor hooks,
which carries out all actions. A block is recorded at a few sizes, usually by a profile. Calls at other sizes run on
tapes whose numbers are computed from the recorded numbers (`tape/symbolic_tape.py`). A normal step has no dispatch
mode.

NOTE [Rules of the executor]. Code and tests refer to these rules by number, as in "rule R3".
R1  Exactness: without a lossy codec, loss and every gradient are bit-equal to plain training, dropout included.
R2  A restored tensor has the dtype, size, stride and storage offset of the saved tensor.
R3  Each storage has one payload, however many operators save it.
R4  Parameters and casts of parameters are never compressed. A cast may be recomputed. Divisors of backward are never
    compressed lossily.
R5  Random operators are replayed from the recorded state of the default generator. Then the generator is restored, so
    that training draws the same numbers as plain training. A plan sees no operators, so a call captures the state when
    autograd saves the last tensor before the operator, or when the call begins. Verification (rule R7) detects draws in
    between. Random operators are never replayed if they may depend on data (`bernoulli` of probabilities, an autograd
    Function), if they draw from another generator, or if no tensor was saved since the previous draw. The results
    of operators that are not replayed are retained or stored losslessly. In dropout only the mask is random, and the
    mask reads no element of the input. Dropout in fused attention depends only on its sizes.
R6  An in-place operator makes a new version of a storage. Replay never changes a version that another operator or slot
    needs. The backward of an autograd function written in Python gets a copy of each tensor that replay reads again,
    and so cannot change the tensor either.
R7  Replay is verified: a value is replayed only if its replay had the original bits at each size at which the block was
    recorded. The recorded sizes are three or more, including odd sizes and multiples of 8. In addition, calls are
    checked: backward compares the checksum of each tensor that it recomputes with the forward's, and the run stops if
    they differ (on a GPU without deterministic algorithms, a warning says so). The first two calls of a block at a size
    are checked, a few later ones, the first calls at new sizes, and all calls of code that a trace leaves out.
    Convolutions whose kernel cuDNN selects by a benchmark (`torch.backends.cudnn.benchmark`) are not replayed, because
    cuDNN may select another kernel in backward's thread. If kernels of an autograd Function write memory without a
    recorded operator, the Function is one operator, and its whole forward runs again (tape/function_recording.py).
    Torch's checkpoint may run a block again only if replay of all its operators gave the original bits
    (`replay_check.is_reproducible`), or if none of its values can be replayed.
R8  A call runs on a tape only if there is evidence that the call runs the tape's operators: Dynamo's guards
    (`tape/guards.py`), which hold if the Python code of the call takes the traced path, whatever the path depends on.
    The call's key adds properties that guards leave out: the numbers that are inputs of the traced graph, offsets and
    shared storages of the arguments. The block's own tensors must have the layout of the tape. Otherwise the call is
    another shape, which is recorded separately. At a new size, the traced graph runs on fake tensors, and its operators
    must be those of the tape (`tape/graph_operators.py`). A block that Dynamo cannot trace completely, or that reads
    data into Python, runs plainly or under torch's checkpoint. Each call compares the tensors that autograd saves with
    the tape.
R9  A call without gradients, in generate(), after an exception, with retain_graph or create_graph, or one of several
    forwards before one backward, is correct or refused, and leaves no state behind. Each of a block's calls in a step
    has its own plan, and is also correct under the plan of any other call.
R10 A normal step never waits for the device.
R11 A packed object never references the tensor object itself, and all state is in packed objects and calls.
R12 Inputs, parameters, buffers and attached tensors are looked up again at each call. Replay from any other tensor is
    not possible.
R13 Collective operators are never replayed, so that no rank waits for a rank with another plan. The results of
    collectives are retained or compressed. A block with collectives that torch's checkpoint must run is checkpointed
    under every plan.
R14 Indices that are chosen from data (an expert's tokens, a row order) are never replayed, so that backward uses those
    of the forward. Statistics of lossily stored rows (such as a norm's) are stored too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from adacc_hf.artifacts.call_names import block_of_call, call_name, calls_per_block
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import ChunkedHeadError, PolicyMismatchError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.setting_checks import check_type, settings_in_config
from adacc_hf.artifacts.tables import policy_tables
from adacc_hf.head.head import ChunkedHead
from adacc_hf.kernels._host_pool import host_pool
from adacc_hf.run.block_executor import BlockExecutor
from adacc_hf.run.blocks import CheckpointStrategy, Installation
from adacc_hf.tape.tape_cache import TapeCache, profiled_tapes
from adacc_hf.torch_glue.progress import announce
from adacc_hf.torch_glue.zero3 import is_partitioned

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile


@dataclass(frozen=True, slots=True)
class BlockPlans:
    """A policy that is prepared to run: the executor of each block call, by name."""

    policy: Policy
    strategies: dict[str, BlockExecutor]


class PolicyHandle:
    """A policy applied to a model until `remove()`, or the end of the `with` block, which restores the model."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        block_classes: tuple[str, ...] | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.installation = Installation(model, block_classes)
        self.tape_cache = TapeCache(is_partitioned=any(map(is_partitioned, model.parameters())))
        self.tape_cache.take(profiled_tapes(model))
        if profile is not None:  # a profile of another process, whose tapes are not available
            self.tape_cache.expect_orders(profile.kinds)
        self.policy = policy
        self.plans: BlockPlans
        """The executors that `follow` installed last."""
        self.head: ChunkedHead | None = None
        """The chunked head, which may be switched off. None if no policy so far had it."""
        try:
            self.follow(self.prepare(policy))
        except BaseException:
            self.remove()
            raise

    def replace(self, policy: Policy) -> None:
        """Run the blocks under another policy from the next forward on."""
        self.follow(self.prepare(policy, self.plans))

    def prepare(self, policy: Policy, earlier: BlockPlans | None = None) -> BlockPlans:
        """Return the executors for `policy`, for a later `follow`. They share recorded tapes with those in `earlier`.

        Raise PolicyMismatchError if the policy was made for other blocks.
        """
        _check_blocks(policy, list(self.installation.blocks), type(self.installation.model).__name__)
        _check_tiled_modules(policy, self.installation.modules)
        earlier_strategies = {} if earlier is None else earlier.strategies
        strategies = {}
        for name, index in policy.blocks:
            known_shapes = earlier_strategies[name].known_shapes if name in earlier_strategies else None
            strategies[name] = BlockExecutor(name, policy.plans[index], self.tape_cache, known_shapes)
        return BlockPlans(policy, strategies)

    def follow(self, plans: BlockPlans | None) -> None:
        """Run the blocks under `plans`, or under torch's checkpoint if None, from the next forward on.

        Raise MemoryError if the host memory that the policy needs cannot be allocated. The blocks then keep their
        plans.
        """
        if plans is not None and plans.policy.predicted_host_bytes:
            host_pool.reserve(self, plans.policy.predicted_host_bytes, self.installation.model)
        self.installation.expect(self.installation.calls if plans is None else plans.strategies)
        for name, call in self.installation.calls.items():
            call.strategy = CheckpointStrategy() if plans is None else plans.strategies[name]
        if plans is not None:  # else keep the head, because no batch size is safer with a plain head
            self._chunk_head(plans.policy.head == "chunked")
            self.plans, self.policy = plans, plans.policy

    def _chunk_head(self, is_on: bool) -> None:
        """Switch the chunked head on or off, as the policy requires."""
        if self.head is None and is_on:
            try:
                self.head = ChunkedHead(self.installation.model)
            except ChunkedHeadError as error:
                raise PolicyMismatchError(f"the policy has a chunked head, and {error}") from error
        if self.head is not None:
            self.head.is_on = is_on

    def remove(self) -> None:
        """Remove the policy from the model. Further calls have no effect."""
        Applied.forget(self.installation.model, self)
        self.installation.remove()
        if self.head is not None:
            self.head.remove()
        host_pool.release(self)

    def uncalled(self) -> list[str]:
        """Return the names of the blocks that never ran under the policy (their forward was replaced?)."""
        return self.installation.uncalled()

    def __repr__(self) -> str:
        state = "" if self.installation.modules else " (removed)"
        return f"<PolicyHandle on {type(self.installation.model).__name__}{state}: {self.policy.describe()}>"

    def _repr_markdown_(self) -> str:
        """Return the policy as a small table, which notebooks show."""
        return policy_tables(repr(self), self.policy)

    def __enter__(self) -> PolicyHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


APPLIED = "_adacc_applied"
"""Name of the model attribute that holds an `Applied`: the reference to the model's policy handle or session."""


class Applied:
    """Reference from a model to its policy handle or session. It is empty in a copy or pickle of the model."""

    def __init__(self, owner: Any = None, remove: Callable[[], object] | None = None) -> None:
        self.owner, self.remove = owner, remove

    @staticmethod
    def forget(model: nn.Module, owner: object) -> None:
        applied = model.__dict__.get(APPLIED)
        if applied is not None and applied.owner is owner:
            del model.__dict__[APPLIED]

    def __reduce__(self) -> tuple[Any, ...]:
        return Applied, ()


@settings_in_config(AdaccConfig)
def apply_policy(model: nn.Module, policy: Policy, config: AdaccConfig | None = None) -> PolicyHandle:
    """Run the blocks of `model` under `policy` from the next forward with gradients enabled.

    Remove the policy that an earlier `apply_policy` applied to `model`, and log this. Only the field `block_classes` of
    `config` is used. The policy is exact for batches of any size, but its predicted peak is that of the profiled one.

    Raise PolicyMismatchError if the policy was made for other blocks, or has a chunked head that the model does not
    allow; NoBlocksError if the model has no blocks; NestedHooksError if modules are wrapped for activation
    checkpointing. Each block's first call is recorded. The first call raises PolicyMismatchError if its operators
    differ from the profiled operators, and NestedHooksError inside other saved-tensor hooks.
    """
    check_type("apply_policy: model", model, nn.Module, "write apply_policy(model, policy) with a torch.nn.Module")
    advice = "pass a Policy. solve_policy returns one, and Policy.load reads the file or the folder of a run"
    check_type("apply_policy: policy", policy, Policy, advice)
    if remove_policy(model):
        announce("Adacc: this policy replaces the policy or the session that was applied to the model before")
    handle = PolicyHandle(model, policy, config.block_classes if config else None)
    model.__dict__[APPLIED] = Applied(handle, handle.remove)
    return handle


def remove_policy(model: nn.Module) -> bool:
    """Remove the policy that `apply_policy` applied to `model`, or the AdaccSession that was started on `model`.

    Return False if the model has neither a policy nor a session.
    """
    applied = model.__dict__.get(APPLIED)
    if applied is None or applied.remove is None:
        return False
    applied.remove()
    return True


def _check_tiled_modules(policy: Policy, blocks: Mapping[str, nn.Module]) -> None:
    """Raise PolicyMismatchError if a block lacks a module that `policy` runs in tiles."""
    for name, index in policy.blocks:
        tiling = policy.plans[index].tiling
        if tiling is None:
            continue
        paths = dict(blocks[block_of_call(name)].named_modules())
        missing = next((path for path in tiling.modules if path not in paths), None)
        if missing is not None:
            raise PolicyMismatchError(
                f"the policy runs module {missing} of block {name} in tiles, but the block has no such module: "
                f"profile this model and solve a policy for it"
            )


def _check_blocks(policy: Policy, blocks: list[str], model_class: str) -> None:
    """Raise PolicyMismatchError if the policy is for other blocks. The order may differ, as in CLIP: `policy` lists
    the blocks in the order of the forward, and `blocks` in the order of the model's modules."""
    call_names = [name for name, _ in policy.blocks]
    num_calls_by_block = calls_per_block(call_names)
    expected = sorted(call_name(block, i + 1) for block, number in num_calls_by_block.items() for i in range(number))
    if expected == sorted(call_names) and num_calls_by_block.keys() == set(blocks):
        return
    missing = [name for name in (*blocks, *expected) if name not in call_names]
    extra = [name for name in call_names if block_of_call(name) not in blocks]
    raise PolicyMismatchError(
        f"the policy is for {len(num_calls_by_block)} blocks, but {model_class} has {len(blocks)}"
        + (f"; it has no plan for {missing[0]}" if missing else "")
        + (f"; the model has no {extra[0]}" if extra else "")
        + ": profile this model and solve a policy for it"
    )
