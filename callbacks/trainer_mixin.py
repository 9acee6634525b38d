"""AdaccTrainerMixin: a Trainer class that trains within a memory budget, without a callback passed by the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import Trainer

from adacc_hf.adapt.run_state import PolicySource
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.callbacks.adacc import AdaccCallback
from adacc_hf.callbacks.preconditions import refuse_second_callback

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class AdaccTrainerMixin(_Base):
    """Base class that makes a Trainer train within a memory budget, as AdaccCallback does.

    List the mixin before the Trainer's class, which may be a Trainer of TRL. For example:

        class MyTrainer(AdaccTrainerMixin, Trainer):
            pass

        trainer = MyTrainer(model=model, args=args, train_dataset=dataset, adacc_config=AdaccConfig(memory_budget=0.5))
        trainer.train()
        print(trainer.adacc_callback.policy.summary())
    """

    adacc_callback: AdaccCallback
    """The AdaccCallback of this Trainer, with `policy`, `profile`, `history` and `session` of the run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Trainer in cls.__mro__ and cls.__mro__.index(Trainer) < cls.__mro__.index(AdaccTrainerMixin):
            raise TypeError(
                f"class {cls.__name__} has AdaccTrainerMixin after the Trainer's class, where the mixin has no effect: "
                f"write class {cls.__name__}(AdaccTrainerMixin, Trainer)"
            )

    def __init__(
        self,
        *args: Any,
        adacc_config: AdaccConfig | None = None,
        adacc_policy: PolicySource | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            args: arguments of the Trainer's class.
            adacc_config: settings. None means the defaults, with `memory_budget="auto"`.
            adacc_policy: a Policy, the path of a policy file, or a function that makes a Policy from a Profile. The
                policy is used instead of the solver, and never changes during the run.
            kwargs: keyword arguments of the Trainer's class.

        Raises TypeError for another type of `adacc_config` or `adacc_policy`, and ValueError if `callbacks` contains an
        AdaccCallback.
        """
        callback = AdaccCallback(adacc_config, policy=adacc_policy)
        super().__init__(*args, **kwargs)
        self.adacc_callback = callback
        self.add_callback(callback)
        refuse_second_callback(callback, self)
