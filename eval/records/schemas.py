"""JSON Schema of records: their structure, and figures by their names.

All runners share one vocabulary: a name that ends in _bytes is a count of bytes, in _ms a time, and so on. A missing
figure is noticed when the table is rendered from the record.
"""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from typing import Any

from adacc_hf.eval.records.records import Status
from adacc_hf.reports.run_record import Spread

Schema = dict[str, Any]

NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
TEXT: Schema = {"type": "string"}
TRUTH: Schema = {"type": "boolean"}
ANY: Schema = {"$ref": "#/$defs/any"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """Return the schema of an object with exactly these members."""
    members = {**required, **(optional or {})}
    return {"type": "object", "properties": members, "required": list(required), "additionalProperties": False}


def mapping(schema: Schema) -> Schema:
    """Return the schema of an object whose members, with any name, all have this schema."""
    return {"type": "object", "additionalProperties": schema}


def array(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def several(*schemas: Schema) -> Schema:
    """Return a schema for one value of these schemas, null, or a list of such values."""
    return {"anyOf": [*schemas, {"type": "null"}, array({"anyOf": list(schemas)})]}


SPREAD = record({field.name: NUMBER for field in fields(Spread)})
MEASURED = several(NUMBER, SPREAD)
PAIR = {"type": "array", "prefixItems": [COUNT, NUMBER], "minItems": 2, "maxItems": 2}

NAMES: dict[str, Schema] = {
    "_bytes$|^nbytes$|^num_|^(steps|passed)$": several(COUNT),
    "_ms$|_seconds$|_percent$|_ratio$|_loss$|^error$|_error$|^of_|^overhead|^gap$|_by_(round|step|turn)$": MEASURED,
    "^(tokens_per_second|relative_throughput|copy_ms|encode_ms|decode_ms)$": SPREAD,
    "^seconds$": several(NUMBER, mapping(NUMBER)),
    "^acc$": SHARE,
    "^(within_budget|fits|went_back)$": TRUTH,
    "^(actions|blocks|fallbacks)$": nullable(mapping(COUNT)),
    "^reason$": TEXT,
    "^(moment|promise|reference|folder|title|label|dtype|codec|winner)$": nullable(TEXT),
    "curve$": array(PAIR),
}
"""Schemas of figures, by patterns of their names."""

STATUS: Schema = {
    "if": {"required": ["status"], "properties": {"status": {"const": Status.MEASURED.value}}},
    "then": {"properties": {"reason": False}},
    "else": {
        "if": {"required": ["status"]},
        "then": {"required": ["reason"], "properties": {"status": {"enum": [status.value for status in Status]}}},
    },
}
"""Schema of a status: a measured point has no reason, any other point has one."""

DEFINITIONS: Schema = {
    "figures": {"type": "object", "patternProperties": NAMES, "additionalProperties": ANY, "allOf": [STATUS]},
    "any": {
        "if": {"type": "object"},
        "then": {"$ref": "#/$defs/figures"},
        "else": {"if": {"type": "array"}, "then": {"items": ANY}},
    },
}

RUN_INFO: Schema = {
    "type": "object",
    "properties": {"runner": TEXT, "seed": {"type": "integer"}, "threads": COUNT, "device": TEXT},
    "required": ["runner", "seed", "threads", "device"],
}
TRAIN_INFO: Schema = {
    **DEFINITIONS["figures"],
    "properties": {"points": {"type": "object", "additionalProperties": ANY, "minProperties": 1}},
    "required": ["points"],
}
META_INFO = record(
    {
        "status": {"const": "complete"},
        "date": TEXT,
        "commit": nullable({"type": "string", "pattern": "^[0-9a-f]{40}$"}),
        "uncommitted_changes": nullable(TRUTH),
        "device": TEXT,
        "seeds": array({"type": "integer"}),
        "versions": mapping(TEXT),
        "notes": TEXT,
    }
)
RECORD: Schema = {
    **record({"run_info": RUN_INFO, "train_info": TRAIN_INFO, "meta_info": META_INFO}, {"results": mapping(ANY)}),
    "$defs": DEFINITIONS,
}


def need_jsonschema() -> None:
    """Raise ValueError if records cannot be checked, before hours of measurements."""
    if importlib.util.find_spec("jsonschema") is None:
        raise ValueError("checking records needs jsonschema: pip install 'adacc-hf[eval]'")


def check_record(content: Any) -> None:
    """Raise jsonschema.ValidationError, which names the place, for a record without the structure of runner records."""
    import jsonschema

    jsonschema.validate(content, RECORD, cls=jsonschema.Draft202012Validator)
