"""The exit statuses of the commands, and the error that carries one."""

from __future__ import annotations

FITS, MISFIT, NOTHING, SOME_GPUS, NO_GPU, NO_WHEEL, INDEX, UNTRUSTED, NOT_WRITTEN, FAILED = range(10)

# docs/install/doctor.md has the same table.
MEANING = {
    FITS: "all is well, or was done",
    MISFIT: "the installed build does not fit, or is broken",
    NOTHING: "torch or the package is not there; or the command line is wrong",
    SOME_GPUS: "some visible GPUs cannot run this build, others can",
    NO_GPU: "no visible GPU can run this build, or the driver does not work",
    NO_WHEEL: "no prebuilt wheel is made for this torch, Python and machine",
    INDEX: "the index cannot be reached or read",
    UNTRUSTED: "a download is not what the index says, or the index is not to be trusted",
    NOT_WRITTEN: "a file cannot be written or read: full, read-only or another user's",
    FAILED: "the installer or the compiler failed",
}


class Failure(Exception):
    """A command cannot do what it was asked. The text is for the user; `status` is the exit status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
