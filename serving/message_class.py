"""Protobuf messages that no installed package has, made of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2

_KINDS = descriptor_pb2.FieldDescriptorProto
_POOL = descriptor_pool.DescriptorPool()  # of its own, so that nothing clashes with TF Serving's
_POOL.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)


def message_class(name: str, fields: Mapping[str, str], first_number: int = 1) -> Any:
    """Make the class of a proto3 message, once for each name.

    Args:
        name: The message's name, with its package.
        fields: Each field's type, as a .proto file has it: `bool`, `repeated int64`, or the name of a message, which is
            a wrapper of protobuf's or has been made here before.
        first_number: The first field's number; the others count on from it.

    Example:
        >>> message_class("shop.Price", {"currency": "string", "amount": "google.protobuf.DoubleValue"})
    """
    package, _, message_name = name.rpartition(".")
    file = descriptor_pb2.FileDescriptorProto(name=f"headrace/{name}.proto", package=package, syntax="proto3")
    message = file.message_type.add(name=message_name)
    for number, (field_name, text) in enumerate(fields.items(), first_number):
        label, _, type_name = text.rpartition(" ")
        field = message.field.add(name=field_name, number=number)
        field.label = _KINDS.LABEL_REPEATED if label == "repeated" else _KINDS.LABEL_OPTIONAL
        if "." in type_name:
            field.type, field.type_name = _KINDS.TYPE_MESSAGE, f".{type_name}"
            dependency = _POOL.FindMessageTypeByName(type_name).file.name
            if dependency not in file.dependency:
                file.dependency.append(dependency)
        else:
            field.type = _KINDS.Type.Value(f"TYPE_{type_name.upper()}")
    _POOL.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))
