"""The schema: what each feature must look like, as YAML that people read and edit. docs/schema.md has every key.

    features:
      fare: {type: float, min_fraction: 1.0, min: 0.0, max: 700.07}
      payment_type: {type: string, min_fraction: 1.0, domain: [Cash, Credit Card], drift: {l_infinity: 0.1}}
      image: {type: uint8, shape: [28, 28, 1], min_fraction: 1.0}

spec: its parts; files: YAML in and out; infer: from statistics; checks: what data departs in; update: how to give way
to it; diff: what two schemas differ in.
"""

from components.schema.files import SCHEMA_FILE, load_schema, write_schema
from components.schema.spec import FeatureSchema, Schema

__all__ = ["SCHEMA_FILE", "FeatureSchema", "Schema", "load_schema", "write_schema"]
