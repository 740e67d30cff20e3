"""What is refused about pipelines, by whose fault it is."""

from __future__ import annotations

from sava.errors import CallerError, RetryableError


class PipelineUnknown(CallerError):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no pipeline {name}; `sava pipelines list` shows those that there are")
        self.name = name


class PipelineExists(CallerError):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is a pipeline {name} already; `sava pipelines apply` changes it")
        self.name = name


class PipelineInvalid(CallerError):
    """A pipeline that cannot be; says why."""


class PipelineForeign(CallerError):
    """It was made by somebody else, with whom it comes and goes."""

    def __init__(self, name: str, made_by: str) -> None:
        maker = f"by {made_by}, and goes when that does not need it any more" if made_by else "by a person"
        super().__init__(f"pipeline {name} was made {maker}; it can be paused, but not changed or deleted")
        self.name, self.made_by = name, made_by


class PipelineStopping(RetryableError):
    """It was deleted, and its runner has not stopped it yet."""

    def __init__(self, name: str, runner: str) -> None:
        super().__init__(
            f"pipeline {name} was deleted, and runner {runner} is about to stop it; try again in a moment"
        )
        self.name, self.runner = name, runner


class PipelineContended(RetryableError):
    def __init__(self, name: str) -> None:
        super().__init__(f"the record of pipeline {name} changed whenever it was to be changed; try again")
        self.name = name


class RunnerUnknown(CallerError):
    """Its lease has ended, or it never had one. Everything that it had claimed is open to others."""

    def __init__(self, runner: str) -> None:
        super().__init__(f"runner {runner} is not known, or not any more; it has to join (again)")
        self.runner = runner
