"""The part of the Compose specification that an export uses, as a JSON schema: nothing else is allowed.

Written from the specification's text; a whole Compose validates too where one is installed.
"""

TEXT = {"type": "string", "minLength": 1}
DURATION = {"type": "string", "pattern": r"^(\d+(h|m|s|ms|us))+$"}
MOUNT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["type", "target"],
    "properties": {
        "type": {"enum": ["bind", "volume", "tmpfs"]},
        "source": TEXT,
        "target": {"type": "string", "pattern": "^/"},
        "read_only": {"type": "boolean"},
    },
}
DEVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["capabilities"],
    "properties": {
        "driver": TEXT,
        "count": {"oneOf": [{"type": "integer"}, {"const": "all"}]},
        "device_ids": {"type": "array", "items": TEXT},
        "capabilities": {"type": "array", "items": TEXT},
    },
    # The specification: count and device_ids exclude each other.
    "not": {"required": ["count", "device_ids"]},
}
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image"],
    "properties": {
        "image": TEXT,
        "container_name": {"type": "string", "pattern": "^[a-zA-Z0-9][a-zA-Z0-9_.-]+$"},
        "entrypoint": {"type": "array", "items": TEXT},
        "command": {"type": "array", "items": {"type": "string"}},
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^\d+:\d+$"}, "uniqueItems": True},
        "volumes": {"type": "array", "items": MOUNT, "uniqueItems": True},
        "environment": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*(=|$)"},
            "uniqueItems": True,
        },
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "healthcheck": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "test": {"type": "array", "items": TEXT, "minItems": 2},
                "interval": DURATION,
                "timeout": DURATION,
                "start_period": DURATION,
                "retries": {"type": "integer"},
            },
        },
        "ipc": TEXT,
        "shm_size": {"type": "string", "pattern": r"^\d+[kmg]?b?$"},
        "security_opt": {"type": "array", "items": TEXT},
        "cap_add": {"type": "array", "items": TEXT},
        "deploy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "resources": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "reservations": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {"devices": {"type": "array", "items": DEVICE}},
                        }
                    },
                }
            },
        },
    },
}
COMPOSE = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "additionalProperties": False,
    "required": ["services"],
    "properties": {
        "services": {
            "type": "object",
            "additionalProperties": False,
            "minProperties": 1,
            "patternProperties": {"^[a-zA-Z0-9._-]+$": SERVICE},
        }
    },
}
