"""Why a vLLM server did not start: from a log, a model and a device to the answer."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import BadInput

if TYPE_CHECKING:
    from autotune.vllm.diagnosis import Diagnosis

# Everything heavier is imported inside the functions: `autotune explain --help` needs none of it.


def check_readable(path: Path) -> None:
    """Opens the file once, unless that would change it.

    Raises:
        BadInput: it cannot be read, or is a device, which may never end.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISFIFO(mode) and os.access(path, os.R_OK):
            return  # its writer would take the end of this look for the end of its reader
        with path.open("rb") as file:
            # A terminal ends with Ctrl-D and /dev/null at once; /dev/zero and a disk would be read for ever.
            endless = stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not file.isatty())
            if endless and not os.path.samefile(path, os.devnull):
                raise BadInput(f"cannot read {path}: a device is no log")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise BadInput(f"cannot read {str(path)!r}: not a file name") from None


class Adviser:
    """Reads logs; with a model and a device it also asks the predictor."""

    def __init__(
        self, model: str | None, device_text: str | None, version: str | None, *, trust: bool
    ) -> None:
        from autotune.vllm.versions import check_version

        self._version = None if version is None else check_version(version)
        self._spec = None
        self._device = None
        if device_text is not None or model is not None:
            from autotune.devices import device_named

            self._device = device_named(device_text or "auto")
        if model is not None:
            from autotune.models import load_model

            self._spec = load_model(model, trust_remote_code=trust).spec

    def diagnose(self, name: str, path: Path | None) -> Diagnosis:
        from autotune.vllm.diagnosis import diagnose
        from autotune.vllm.logs import read_blocks_of_log, read_log_file
        from autotune.vllm.logtext import stream_blocks

        try:
            if path is None:
                reading = read_blocks_of_log(stream_blocks(sys.stdin.buffer))
            else:
                reading = read_log_file(path)
        except OSError as error:
            raise BadInput(f"cannot read {name}: {error.strerror or error}") from None
        total = None if self._device is None else int(self._device.total.best)
        diagnosis = diagnose(reading, total_bytes=total)
        if self._spec is None or self._device is None:
            return diagnosis
        from autotune.vllm.predicted import with_arithmetic

        return with_arithmetic(diagnosis, self._spec, self._device, self._version)
