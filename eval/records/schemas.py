"""What a record must look like, by runner, as JSON Schema."""

from __future__ import annotations

import importlib.util
from typing import Any

from adacc_hf.eval.records.records import Status

Schema = dict[str, Any]

NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "number", "exclusiveMinimum": 0}
TEXT: Schema = {"type": "string"}
ANY: Schema = {}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with just these members."""
    members = {**required, **(optional or {})}
    return {
        "type": "object",
        "properties": members,
        "required": list(required),
        "additionalProperties": False,
    }


def mapping(schema: Schema) -> Schema:
    """An object whose members, by any name, are all like this."""
    return {"type": "object", "additionalProperties": schema}


def array(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def ended(measured: Schema, failed: Schema | None = None) -> Schema:
    """A point with its status: what was measured, or the reason why nothing was."""
    done = Status.MEASURED.value
    with_status = {**measured, "properties": {"status": {"const": done}, **measured["properties"]}}
    others = [status.value for status in Status if status.value != done]
    return {
        "if": {"properties": {"status": {"const": done}}},
        "then": {**with_status, "required": ["status", *measured["required"]]},
        "else": failed or record({"status": {"enum": others}, "reason": TEXT}, TRIAL_MEMORY),
    }


def perhaps_ended(measured: Schema) -> Schema:
    """As `ended`, of points that were saved without a status before they could fail."""
    failed = ended(measured)
    return {"if": {"required": ["status"]}, "then": failed, "else": measured}


SPREAD = record({"low": NUMBER, "median": NUMBER, "high": NUMBER})
TIMED = {"step_ms": SPREAD, "tokens_per_second": SPREAD}
TRIAL_MEMORY = {"static_bytes": COUNT, "peak_bytes": COUNT, "reserved_bytes": COUNT}
GATE = record(
    {"promise": TEXT, "reference": TEXT, "sequences": COUNT}, {"gradient_error": NUMBER, "slope_error": NUMBER}
)
PREDICTION = ended(
    record(
        {
            **dict.fromkeys(("predicted_bytes", "stored_bytes"), COUNT),
            **dict.fromkeys(("moment", "head"), TEXT),
            "static": mapping(COUNT),
            "step_ms": POSITIVE,
            "cpu_seconds": NUMBER,
        },
        {"peak_bytes": COUNT},
    )
)
SPEEDS = ended(record({"ratio": POSITIVE, "tokens_per_ms": array(POSITIVE), "cpu_seconds": NUMBER}))
TRIAL = ended(
    record(
        {"decided": mapping(ANY), "static_bytes": COUNT, "peak_bytes": COUNT},
        {**TIMED, "gate": GATE, "reserved_bytes": COUNT, "num_alloc_retries": COUNT},
    )
)
HEADLINE = ended(
    record(
        {"decided": mapping(ANY), "static_bytes": COUNT, "peak_bytes": COUNT, "gate": GATE},
        {
            **TIMED,
            **{f"{name}_step_ms": SPREAD for name in ("plain", "checkpointing")},
            **{f"{name}over_checkpointing": SPREAD for name in ("", "plain_")},
            "share_won": nullable(NUMBER),
            "reserved_bytes": COUNT,
            "num_alloc_retries": COUNT,
        },
    )
)
CURVE = array({"type": "array", "prefixItems": [COUNT, NUMBER], "minItems": 2, "maxItems": 2})
TRAINING = ended(record({"curve": CURVE, "training_curve": CURVE}))
WHOLE_STEP = ended(record(dict.fromkeys(("static_bytes", "peak_bytes", "first_peak_bytes"), COUNT)))
PLANNED_PEAK = record(dict.fromkeys(("shared_peak_bytes", "peak_bytes"), COUNT))
SHAPE = ended(record({"memory": mapping(WHOLE_STEP), "plans": mapping(PLANNED_PEAK), "bf16_plan": PLANNED_PEAK}))
LOW_RANK_TIME = record(
    {"step_ms": SPREAD, "of_plain": POSITIVE, "of_plain_by_round": SPREAD, "peak_bytes": COUNT},
    {"drawing_ms": POSITIVE, "drawing_gap": COUNT},
)
LOW_RANK_TIMES = ended({**mapping(LOW_RANK_TIME), "properties": {}, "required": []})
TEXT_TRAINING = ended(record({"curve": CURVE, "peak_bytes": COUNT, "parameters": COUNT}))
GAP = nullable(record(dict.fromkeys(("final_percent", "largest_percent", "mean_drift_percent"), NUMBER)))
SCORE = record(
    {
        "acc": {"type": "number", "minimum": 0, "maximum": 1},
        "acc_stderr": nullable(NUMBER),
        "acc_norm": nullable(NUMBER),
        "perplexity": nullable(POSITIVE),
        "num_samples": COUNT,
        "num_samples_original": COUNT,
        "num_fewshot": COUNT,
        "version": NUMBER,
    }
)
RIVAL = nullable(record({"peer": TEXT, "speed_ratio": POSITIVE}))
COMPARISON = record(
    {"peer": TEXT, "compiled": {"type": "boolean"}, "speed_ratio": nullable(POSITIVE), "peak_ratio": nullable(POSITIVE)}
)
_STEP_OF_OTHERS = {
    f"of_{base}{suffix}": schema
    for base in ("plain", "checkpointing")
    for suffix, schema in (("", POSITIVE), ("_by_round", SPREAD))
}
STEP_FIGURES = record(
    {
        "step_ms": SPREAD,
        "stored_bytes": COUNT,
        "peak_bytes": COUNT,
        **_STEP_OF_OTHERS,
    },
    {
        "overhead_per_block_ms": NUMBER,
        "peak_of_checkpointing": POSITIVE,
        "gradient_error": NUMBER,
        "budget": mapping(ANY),
        "within_budget": {"type": "boolean"},
        "predicted_stored_bytes": COUNT,
        "predicted_peak_bytes": COUNT,
        "predicted_overhead_ms": NUMBER,
        "actions": mapping(COUNT),
        "blocks": mapping(COUNT),
        "solve_seconds": NUMBER,
    },
)
GRADIENT_TRAINING = record({"final_loss": NUMBER, "another_batch": POSITIVE})
GRADIENT_ERROR = record(
    {
        "name": TEXT,
        "scale": nullable(TEXT),
        "group_size": nullable(COUNT),
        "rounding": nullable(TEXT),
        "error": POSITIVE,
        "round_trip_error": nullable(POSITIVE),
    }
)
BANDWIDTH = record(
    {
        "what": TEXT,
        "shape": array(COUNT),
        "dtype": TEXT,
        "tensor_bytes": COUNT,
        "payload_bytes": COUNT,
        "copy_ms": SPREAD,
        "encode_ms": SPREAD,
        "decode_ms": SPREAD,
        "round_trip_error": NUMBER,
    }
)
SOLVES = record(
    {
        "attention": TEXT,
        "num_blocks": COUNT,
        "num_kinds": COUNT,
        "seconds": mapping(NUMBER),
        "infeasible_percents": array(COUNT),
        "slowest_percent": COUNT,
        **dict.fromkeys(("median_seconds", "max_seconds", "max_of_all_repeats_seconds"), NUMBER),
    },
    {"gap": nullable(SPREAD)},
)
PEAK = record(
    {
        **dict.fromkeys(("family", "attention", "precision"), TEXT),
        **dict.fromkeys(("budget_bytes", "predicted_bytes", "measured_bytes", "first_bytes"), COUNT),
        "error": NUMBER,
        "within_budget": {"type": "boolean"},
    }
)
TRADED = record(
    {
        **dict.fromkeys(("label", "winner"), TEXT),
        "nbytes": COUNT,
        "codec": nullable(TEXT),
        "payload_bytes": nullable(COUNT),
        **dict.fromkeys(("recompute_ms", "compress_ms", "recompute_band", "compress_band"), nullable(NUMBER)),
    }
)
GRAPH_STEP = {
    **dict.fromkeys(("predicted_bytes", "stored_bytes"), COUNT),
    **dict.fromkeys(("modelled_peak_bytes", "peak_bytes"), COUNT),
    "predicted_peak_bytes": nullable(COUNT),
    "overhead_ms": NUMBER,
    "step_ms": POSITIVE,
    "share": NUMBER,
}
CODE_LOOKED_AT = {"went_back": {"type": "boolean"}, "graph_peak_bytes": COUNT}
"""Not in records of before compiled code was looked at: their predictions are the graphs'."""
GRAPH_TRIAL = record(GRAPH_STEP, CODE_LOOKED_AT)
GRAPH_BUDGETS = ended(record({"plain": GRAPH_TRIAL, "trials": array(GRAPH_TRIAL)}))
COMPILATION = {"cpu_seconds": POSITIVE, "graphs_from_cache": COUNT, "joint_graphs_from_cache": COUNT}
COMPILATIONS = ended(record({**COMPILATION, "again": ended(record(COMPILATION))}))
NEW_LENGTH = record(
    {
        **dict.fromkeys(("first_ms", "second_ms", "steady_ms", "extra_ms"), NUMBER),
        "amortised_after": nullable(COUNT),
    },
)
SIZES = array(array(COUNT))
BESIDE_OTHERS = {
    "steps_ms": array(POSITIVE),
    **dict.fromkeys(("step_ms", "of_plain_by_step", "of_checkpointing_by_step"), SPREAD),
    "mean_of_plain": POSITIVE,
}
CHANGING_LENGTHS = record(
    {
        "sizes": SIZES,
        "fixed_size": array(COUNT),
        "left_out": COUNT,
        "skipped": mapping(TEXT),
        "methods": mapping(
            record(
                {
                    **BESIDE_OTHERS,
                    **dict.fromkeys(("of_plain", "of_checkpointing"), POSITIVE),
                    **dict.fromkeys(("of_fixed", "of_fixed_beside_plain"), POSITIVE),
                    **dict.fromkeys(("fixed_step_ms", "of_fixed_beside_plain_by_turn"), SPREAD),
                    **dict.fromkeys(("first_of_later", "first_of_later_beside_plain"), SPREAD),
                    **dict.fromkeys(("stored_of_plain", "gradient_error", "loss_drift"), NUMBER),
                },
                {"actions": mapping(COUNT), "fallbacks": mapping(COUNT)},
            )
        ),
    }
)
TRAINED = {"loss": NUMBER, "mean_ms": POSITIVE, "mean_of_checkpointing": POSITIVE}
LENGTH_TRAINING = record({**BESIDE_OTHERS, **TRAINED, "policy_step": nullable(COUNT), "num_policies": COUNT})
LENGTH_TRAININGS = record({"sizes": SIZES, "left_out": COUNT, "trainings": mapping(LENGTH_TRAINING)})
GOAL = record({"goal": TEXT, "asked": NUMBER, "kept": COUNT, "tried": COUNT, "worst": NUMBER, "where": TEXT})
TABLE4_TRAINING = ended(
    record(
        {
            "folder": TEXT,
            "steps": COUNT,
            "final_train_loss": NUMBER,
            "validation_loss": NUMBER,
            "gone_on_from": nullable(TEXT),
            "actions": nullable(mapping(COUNT)),
        }
    )
)
DEMO_ROW = record(
    {
        "title": TEXT,
        "folder": TEXT,
        "activation_bytes": COUNT,
        "peak_bytes": COUNT,
        "relative_throughput": SPREAD,
        "final_train_loss": NUMBER,
        "validation_loss": NUMBER,
    }
)
RUN = ended(
    record({"seconds": NUMBER, "record": TEXT}),
    record({"status": TEXT, "reason": TEXT}, {"seconds": NUMBER, "record": TEXT}),
)

TESTED = {"passed": COUNT, "skipped": COUNT, "failed": array(TEXT), "seconds": NUMBER}
GPU_TESTS = ended(record(TESTED), record({"status": TEXT, "reason": TEXT, **TESTED}))

POINTS: dict[str, dict[str, Schema]] = {
    # By patterns of the points' keys.
    "throughput": {", batch \\d+$": TRIAL},
    "headline": {"": HEADLINE},
    "max_batch": {", batch \\d+$": TRIAL},
    "loss": {"": TRAINING},
    "peers": {"": TRIAL},
    "gradient_error": {"^gradient, training$": GRADIENT_TRAINING, "^gradient, (?!training$)": GRADIENT_ERROR},
    "codec_bandwidth": {"^bandwidth, ": perhaps_ended(BANDWIDTH)},
    "solver": {"": record({"stored": SOLVES, "peak": SOLVES})},
    "published": {", speed$": SPEEDS, "^(?!.*, speed$)": PREDICTION},
    "peak_accuracy": {"": perhaps_ended(record({"peaks": array(PEAK)}))},
    "compiled": {", budgets$": GRAPH_BUDGETS, ", compilation, ": COMPILATIONS},
    "table1": {"": record({"activations": array(TRADED)})},
    "lengths": {"^(?!trainer$)": CHANGING_LENGTHS, "^trainer$": LENGTH_TRAININGS},
    "executor_bench": {"": record({"methods": mapping(STEP_FIGURES), "new_length": NEW_LENGTH})},
    "whole_blocks": {"": record({"budget": POSITIVE, "methods": mapping(STEP_FIGURES)})},
    "compact": {"^time$": LOW_RANK_TIMES, "^(?!time$)": SHAPE},
    "compact_training": {", seed \\d+$": TEXT_TRAINING},
    "table4": {"/training$": TABLE4_TRAINING, "/(?!training$)": SCORE},
    "downstream": {"": SCORE},
    "cloze": {"": SCORE},
    "all": {"": RUN},
    "gpu_tests": {"": GPU_TESTS},
    "demo_comparison": {"": DEMO_ROW},
}
POINTS["codecs"] = POINTS["gradient_error"] | POINTS["codec_bandwidth"]

SUMMARIES: dict[str, dict[str, Schema]] = {
    "throughput": {"adacc_over": mapping(mapping(POSITIVE)), "paper": mapping(array(NUMBER))},
    "headline": {"goals": mapping(NUMBER)},
    "max_batch": {"max_batch": mapping(COUNT), "paper": mapping(COUNT)},
    "loss": {"gap_to_plain": mapping(GAP), "paper_gap_percent": array(NUMBER)},
    "peers": {
        "titles": mapping(TEXT),
        "adacc_against": array(COMPARISON),
        "within_adaccs_peaks": array(record({"adacc": TEXT, "eager": RIVAL, "compiled": RIVAL})),
    },
    "lengths": {"goals": array(GOAL)},
    "solver": {"paper_seconds": NUMBER},
    "compact": {"paper_gib": mapping(mapping(POSITIVE))},
    "published": {"goal": mapping(NUMBER)},
    "table4": {"paper": mapping(mapping(mapping(nullable(NUMBER))))},
    "downstream": {"average_acc": NUMBER},
    "cloze": {"average_acc": NUMBER},
}

META_INFO = record(
    {
        "status": {"const": "complete"},
        "date": TEXT,
        "commit": nullable({"type": "string", "pattern": "^[0-9a-f]{40}$"}),
        "uncommitted_changes": nullable({"type": "boolean"}),
        "device": TEXT,
        "seeds": array({"type": "integer"}),
        "versions": mapping(TEXT),
        "notes": TEXT,
    }
)


def schema_of(runner: str) -> Schema:
    """The schema of a runner's complete records."""
    points = {
        "type": "object",
        "patternProperties": {pattern or ".": schema for pattern, schema in POINTS[runner].items()},
        "additionalProperties": False,
        "minProperties": 1,
    }
    run_info = {
        "type": "object",
        "properties": {"runner": {"const": runner}, "seed": {"type": "integer"}, "threads": COUNT, "device": TEXT},
        "required": ["runner", "seed", "threads", "device"],
    }
    results = {"results": mapping(SCORE)} if runner in ("downstream", "cloze") else {}
    train_info = record({"points": points, **SUMMARIES.get(runner, {})})
    return record({"run_info": run_info, "train_info": train_info, "meta_info": META_INFO, **results})


def need_jsonschema() -> None:
    """Raise ValueError where no record can be checked, before hours are measured for it."""
    if importlib.util.find_spec("jsonschema") is None:
        raise ValueError("records are checked with jsonschema: pip install 'adacc-hf[eval]'")


def check_record(content: Any) -> None:
    """Raises jsonschema.ValidationError, which names the place, for a record that is not as its runner leaves it."""
    import jsonschema

    runner = content["run_info"]["runner"]
    jsonschema.validate(content, schema_of(runner), cls=jsonschema.Draft202012Validator)
