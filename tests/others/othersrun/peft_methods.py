"""PEFT's methods: (name, class of the configuration, other fields of the case)."""

from typing import Any

_QV = {"target_modules": ["q_proj", "v_proj"]}
_CAUSAL = {"task_type": "CAUSAL_LM"}
_A_CACHE = {"refused": "passes its prefix to the blocks as a key-value cache"}
"""Fields of methods with a key-value cache. PEFT itself refuses them with gradient checkpointing."""


def _settings(**settings: Any) -> dict[str, Any]:
    return {"settings": settings}


_ADAPTERS: list[tuple[str, str, dict[str, Any]]] = [
    ("lora", "LoraConfig", {"r": 4, "lora_dropout": 0.1}),
    ("rslora", "LoraConfig", {"r": 4, "use_rslora": True}),
    ("dora", "LoraConfig", {"r": 4, "use_dora": True, "lora_dropout": 0.1}),
    ("pissa", "LoraConfig", {"r": 4, "init_lora_weights": "pissa"}),
    ("olora", "LoraConfig", {"r": 4, "init_lora_weights": "olora"}),
    ("lora bias", "LoraConfig", {"r": 4, "bias": "all", "modules_to_save": ["lm_head"]}),
    ("lora tokens", "LoraConfig", {"r": 4, "trainable_token_indices": [5, 6, 7]}),
    ("loha", "LoHaConfig", {"r": 4, "module_dropout": 0.1}),
    ("lokr", "LoKrConfig", {"r": 4, "rank_dropout": 0.1}),
    ("oft", "OFTConfig", {"oft_block_size": 8}),
    ("boft", "BOFTConfig", {"boft_block_size": 4}),
    ("vera", "VeraConfig", {"r": 8, "vera_dropout": 0.1}),
    ("pvera", "PveraConfig", {"r": 8}),
    ("randlora", "RandLoraConfig", {"r": 8}),
    ("vblora", "VBLoRAConfig", {"r": 4, "num_vectors": 16, "vector_length": 16}),
    ("fourierft", "FourierFTConfig", {"n_frequency": 20}),
    ("waveft", "WaveFTConfig", {"n_frequency": 20}),
    ("hra", "HRAConfig", {"r": 4}),
    ("miss", "MissConfig", {"r": 8, "miss_dropout": 0.1}),
    ("shira", "ShiraConfig", {"r": 4, "random_seed": 0}),
    ("c3a", "C3AConfig", {"block_size": 16}),
    ("road", "RoadConfig", {"group_size": 16}),
    ("delora", "DeloraConfig", {"r": 4}),
    ("gralora", "GraloraConfig", {"r": 8, "alpha": 8}),
    ("glora", "GloraConfig", {"r": 4}),
    ("hira", "HiraConfig", {"r": 4, "hira_dropout": 0.1}),
    ("lily", "LilyConfig", {"r": 4}),
    ("peanut", "PeanutConfig", {"r": 4}),
    ("psoft", "PsoftConfig", {"r": 8}),
    ("deft", "DeftConfig", {"r": 4}),
    ("tinylora", "TinyLoraConfig", {"r": 2, "u": 16}),
    ("unilora", "UniLoraConfig", {"r": 4}),
    ("frod", "FrodConfig", {"progressbar": False}),
    ("adamss", "AdamssConfig", {"r": 8, "num_subspaces": 2}),
    ("osf", "OSFConfig", {"effective_rank": 8}),
    ("supertuning", "SupertuningConfig", {}),
    ("beft", "BeftConfig", {}),
]
"""Methods that change the projections of queries and values."""

METHODS: list[tuple[str, str, dict[str, Any]]] = [
    *((name, config, _settings(**_QV, **settings)) for name, config, settings in _ADAPTERS),
    ("lora gpt2", "LoraConfig", {**_settings(r=4, lora_dropout=0.1, fan_in_fan_out=True), "model": "gpt2"}),
    ("adalora", "AdaLoraConfig", _settings(**_QV, r=4, total_step=6, tinit=1, tfinal=1)),
    (
        "ia3",
        "IA3Config",
        _settings(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    ("ln tuning", "LNTuningConfig", _settings(target_modules=["input_layernorm", "post_attention_layernorm"])),
    ("trainable tokens", "TrainableTokensConfig", _settings(token_indices=[5, 6, 7])),
    ("prompt tuning", "PromptTuningConfig", _settings(**_CAUSAL, num_virtual_tokens=4)),
    ("p-tuning", "PromptEncoderConfig", _settings(**_CAUSAL, num_virtual_tokens=4, encoder_hidden_size=32)),
    (
        "cpt",
        "CPTConfig",
        _settings(**_CAUSAL, cpt_token_ids=[8, 9, 10], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3]),
    ),
    ("adaption prompt", "AdaptionPromptConfig", _settings(**_CAUSAL, adapter_len=4, adapter_layers=1)),
    ("prefix tuning", "PrefixTuningConfig", {**_settings(**_CAUSAL, num_virtual_tokens=4), **_A_CACHE}),
    ("cartridge", "CartridgeConfig", {**_settings(**_CAUSAL, num_virtual_tokens=4), **_A_CACHE}),
]
