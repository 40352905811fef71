"""Which runtime executes a version: TensorFlow for a SavedModel, LiteRT for model.tflite, ONNX Runtime for model.onnx.

Each is loaded with the first model that needs it, so a server of LiteRT or ONNX files never loads TensorFlow.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from serving.backends.trial import try_to_load
from serving.errors import Code, ServingError
from serving.settings import LoadSettings
from serving.versions import LITERT_FILE, ONNX_FILE, has_saved_model

if TYPE_CHECKING:
    from serving.backends.signatures import SignatureModel

logger = logging.getLogger(__name__)

AUTO, SAVED_MODEL, LITERT, ONNX = BACKENDS = ("auto", "saved_model", "litert", "onnx")
_FILES = {LITERT: LITERT_FILE, ONNX: ONNX_FILE}


def load_model(path: Path, settings: LoadSettings) -> SignatureModel:
    """Load a version with the back end that the settings name; `auto` takes what is there, and a SavedModel first.

    A version of this project's own making need not hold model.tflite or model.onnx: it lists its files in
    assets.extra/formats.json, of which the first of the kind is taken.

    Args:
        path: the version directory.
        settings: `backend` and `prefer_tflite_model` choose; `trial_load` says whether another process tries it first.

    Raises:
        ServingError: NOT_FOUND without a file for the back end, FAILED_PRECONDITION without the package that runs it,
            else as the back end has it.
    """
    backend = settings.backend
    if backend == AUTO:
        backend = _first_choice(path, settings.prefer_tflite_model)
    if settings.trial_load == "always" or (settings.trial_load == "auto" and backend == LITERT):
        try_to_load(path, settings)
    if backend == SAVED_MODEL:
        from serving.backends.saved_model import SavedModel, session_config

        return SavedModel(path, tags=settings.tags, config=session_config(settings))
    file, note = _find_file(path, backend)
    try:
        if backend == LITERT:
            from serving.backends.litert_model import LiteRtModel

            return LiteRtModel(file, settings.intra_op_threads or 1, note)
        from serving.backends.onnx_model import OnnxModel

        return OnnxModel(file, settings.intra_op_threads, note)
    except ImportError as error:
        package = {LITERT: "ai-edge-litert", ONNX: "onnxruntime"}[backend]
        message = f"{file} needs a package that cannot be imported ({error}): pip install {package}"
        raise ServingError(Code.FAILED_PRECONDITION, message) from error


def _first_choice(path: Path, prefer_tflite_model: bool) -> str:
    if has_saved_model(path) and not (prefer_tflite_model and (path / LITERT_FILE).is_file()):
        return SAVED_MODEL
    for backend, name in _FILES.items():
        if (path / name).is_file():
            return backend
    return SAVED_MODEL


def _find_file(path: Path, backend: str) -> tuple[Path, str]:
    """The file for a back end, and what its clients should know of its inputs."""
    file = path / _FILES[backend]
    if file.is_file():
        return file, ""
    forms = path / "assets.extra" / "formats.json"
    for form in json.loads(forms.read_bytes()) if forms.is_file() else ():
        file = path / form["path"]
        if file.suffix == Path(_FILES[backend]).suffix and file.is_file():
            if form["inputs"] == "raw":
                return file, ""
            note = f" ({form['path']} takes what the signature transform of its SavedModel gives, not raw features)"
            logger.warning("%s:%s", path, note)
            return file, note
    message = f"{path} holds no {_FILES[backend]}, and no other file for the back end {backend}"
    raise ServingError(Code.NOT_FOUND, message)
