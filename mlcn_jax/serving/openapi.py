"""The OpenAPI description of the requests that `serve` answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlcn_jax.serving.http_service import Limits

_CODES = {
    "400": "no picture was classified, or the request is malformed",
    "408": "the request arrived too slowly",
    "413": "too many bytes or pictures",
    "415": "the content type is not supported",
    "429": "too many requests are waiting: try again",
    "500": "the model failed",
    "503": "it cannot be answered within the deadline, or memory is short: try again",
}


def description(class_names: Sequence[str], limits: "Limits") -> dict[str, Any]:
    """The description, in OpenAPI 3.1, of a server with these classes and limits."""
    top = {
        "anyOf": [{"type": "integer", "minimum": 1, "maximum": len(class_names)}, {"const": "all"}],
        "description": "how many of the most probable classes to return, or all",
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlcn_jax serve",
            "version": "1",
            "description": f"Classifies pictures into {len(class_names)} classes.",
        },
        "paths": {
            "/": {"get": _get("A page for browsers (Accept: text/html), or the model and the limits", "Model")},
            "/health": {
                "get": {
                    **_get("Whether the model answers", "Health"),
                    "responses": {"200": _json("it answers", "Health"), "503": _json("it failed", "Health")},
                }
            },
            "/metrics": {"get": {"summary": "Metrics for Prometheus", "responses": {"200": _text()}}},
            "/openapi.json": {
                "get": {"summary": "This description", "responses": {"200": {"description": "OpenAPI 3.1"}}}
            },
            "/predict": {"post": _predict(limits, top)},
        },
        "components": {"schemas": _schemas(class_names)},
    }


def _predict(limits: "Limits", top: dict[str, Any]) -> dict[str, Any]:
    picture = {"schema": {"type": "string", "format": "binary"}}
    images = {
        "type": "array",
        "items": {"type": "string", "contentEncoding": "base64"},
        "minItems": 1,
        "maxItems": limits.max_images,
    }
    errors = {code: _json(meaning, "Error") for code, meaning in _CODES.items()}
    return {
        "summary": "Classify pictures",
        "parameters": [
            {
                "name": "top",
                "in": "query",
                "schema": top,
                "description": "takes precedence over the field `top` of the body",
            },
            {
                "name": "probabilities",
                "in": "query",
                "allowEmptyValue": True,
                "schema": {"type": "string"},
                "description": "if given, the answer also has the probability of each class by name",
            },
        ],
        "requestBody": {
            "required": True,
            "description": f"At most {limits.max_body_bytes} bytes and {limits.max_images} pictures, which must "
            f"arrive within {limits.timeout_seconds:g} seconds. PNG, JPEG, WebP, BMP or GIF.",
            "content": {
                "image/*": picture,
                "application/octet-stream": picture,
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "properties": {"top": top},
                        "additionalProperties": {"type": "string", "format": "binary"},
                    }
                },
                "application/json": {
                    "schema": {"type": "object", "required": ["images"], "properties": {"images": images, "top": top}}
                },
            },
        },
        "responses": {"200": _json("some picture was classified", "Answer"), **errors},
    }


def _schemas(class_names: Sequence[str]) -> dict[str, Any]:
    name = {"type": "string", "enum": list(class_names)}
    probability = {"type": "number", "minimum": 0, "maximum": 1}
    one = {"class": name, "probability": probability}
    predictions = {"type": "array", "items": {"$ref": "#/components/schemas/Prediction"}}
    error = {"type": "string"}
    return {
        "Prediction": {
            "type": "object",
            "description": "prediction for one picture; one that cannot be read has only `error`, the reason",
            "properties": {
                **one,
                "top": {"type": "array", "items": {"type": "object", "properties": one, "required": list(one)}},
                "probabilities": {"type": "object", "additionalProperties": probability},
                "error": error,
            },
        },
        "Answer": {"type": "object", "required": ["predictions"], "properties": {"predictions": predictions}},
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {"error": error, "predictions": predictions},
        },
        "Health": {"type": "object", "properties": {"status": {"enum": ["ready", "failing"]}}},
        "Model": {
            "type": "object",
            "properties": {
                "classes": {"type": "array", "items": name},
                "image_shape": {"type": "array", "items": {"type": "integer"}},
                "step": {"type": "integer"},
                "exported": {"type": "string", "format": "date", "description": "absent if not exported"},
                "runtime": {
                    "description": "xla, onnxruntime or per lane; by number of images if the faster one computes",
                    "oneOf": [{"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}],
                },
                "limits": {"type": "object", "additionalProperties": {"type": "number"}},
            },
        },
    }


def _get(summary: str, schema: str) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _json(summary, schema)}}


def _json(meaning: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": meaning, "content": content}


def _text() -> dict[str, Any]:
    return {
        "description": "in the text format of Prometheus",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
