"""What is finished of a long job: lines appended to a file, found again by key after any end of the process."""

import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

from osprey_jax.command import UserError

_HEADER = b'{"settings": '
_SYNC_SECONDS = 5.0  # of work that a loss of power may cost; a kill costs nothing that was added


class Journal:
    """A first line with the settings, then one for each entry: an object with `key`. The last entry of a key counts.

    The file appears with the first entry. Entries stay on the disk; memory holds where they are.

    Attributes:
      failed: keys whose last entry has a field `failed`.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        """Go on with `path` where it exists; a last line cut off by a kill is removed from it.

        Raises:
          UserError: another kind of file, or a journal of other settings.
        """
        self.path = path
        self.failed: set[str] = set()
        self._settings = settings
        self._places: dict[str, int] = {}
        self._file: BinaryIO | None = None
        self._synced = time.monotonic()
        if path.exists():
            self._recover()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def add(self, entry: dict[str, Any]) -> None:
        """Append `entry`: whole, or after a kill as a last line without its end; after an error, not at all."""
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            if self._file.tell() == 0:
                self._append({"settings": self._settings})
            self._note(entry, self._append(entry))
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError as error:  # which does not name the file
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from error

    def read(self, key: str) -> dict[str, Any] | None:
        """The last entry of `key`."""
        if key not in self._places:
            return None
        with self.path.open("rb") as lines:
            lines.seek(self._places[key])
            return json.loads(lines.readline())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, value: dict[str, Any]) -> int:
        """The place of the line."""
        place, rest = self._file.tell(), json.dumps(value, ensure_ascii=False).encode() + b"\n"
        try:
            while rest:  # a disk that fills up takes a part, and says so when asked for more
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.seek(place)
            self._file.truncate()
            raise
        return place

    def _note(self, entry: dict[str, Any], place: int) -> None:
        self._places[entry["key"]] = place
        (self.failed.add if "failed" in entry else self.failed.discard)(entry["key"])

    def _recover(self) -> None:
        end = 0
        try:
            with self.path.open("rb") as lines:
                for line in lines:
                    if end == 0 and line[: len(_HEADER)] != _HEADER[: len(line)]:
                        raise ValueError
                    if not line.endswith(b"\n"):
                        break
                    value = json.loads(line)
                    if end == 0:
                        self._check(value["settings"])
                    else:
                        self._note(value, end)
                    end += len(line)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path}: not a partial output of this command; remove it to start again") from error
        os.truncate(self.path, end)

    def _check(self, before: dict[str, Any]) -> None:
        now = self._settings
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if changed:
            raise UserError(
                f"{self.path}: was made with another {', '.join(changed)}; restore that to go on, or remove the file "
                "to start again"
            )
