"""Every exception that hs_ray raises on purpose, and the exit code each one ends a job with.

    HsRayError                  1  the run failed
    ├── UserError               2  the user must change something
    │   ├── ConfigError            a key, its value, what is allowed, what to do
    │   ├── InputError             the input cannot be read, or too much of it is unusable
    │   ├── OutputError            the output is held, foreign, damaged in its plan, or does not fit
    │   ├── UnsupportedError       a model or an SGLang release that capture is not proven for
    │   └── PatchError             a patch does not fit the installed SGLang
    ├── CaptureError               states do not match the request: wrong count, width, dtype, or a gap
    │   └── CanaryError            the engine failed its check before the first unit
    ├── LostLeaseError             another driver took the output over
    ├── RunError                   what the run stands on failed it: a disk, a store, a node
    └── ShardError                 a committed file is damaged or is not ours

One whose message says it all (`plain`) is printed without a traceback; anything else keeps it.
"""

from collections.abc import Sequence
from typing import Any


class HsRayError(Exception):
    exit_code = 1
    plain = False


class UserError(HsRayError):
    exit_code = 2
    plain = True


class ConfigError(UserError):
    """All problems found at once, one a line: `key = value: what is allowed; what to do`."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[Any, ...]:  # exceptions cross Ray's process border by pickle
        return type(self), (self.problems,)


class InputError(UserError):
    pass


class OutputError(UserError):
    pass


class UnsupportedError(UserError):
    pass


class PatchError(UserError):
    pass


class CaptureError(HsRayError):
    pass


class CanaryError(CaptureError):
    plain = True


class LostLeaseError(HsRayError):
    plain = True


class RunError(HsRayError):
    plain = True


class ShardError(HsRayError):
    plain = True  # it names the file: where in our code it was read helps nobody
