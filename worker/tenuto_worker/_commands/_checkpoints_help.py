"""What `tenuto checkpoints --help` says, and `--help` after each action."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

DESCRIPTION: Final = """\
What workers keep on disk, a folder a job. While Redis has its jobs, checkpoints only make catching
up cheap: deleting them loses no token, only time. If Redis loses its jobs, they are all that jobs,
streams and results can be brought back from.
"""
EPILOG: Final = """\
actions (tenuto checkpoints ACTION --help tells more):
  list                  what stands on disk
  verify                check every byte; exit code 1 if any file is damaged
  gc [--dry-run]        remove those of jobs that are gone
  recover [--dry-run] [--force]
                        put jobs back that Redis does not have, with streams and results

exit codes: 0 done, 1 damaged, or not put back, 2 usage, 3 no Redis (gc, recover), 4 no such job
(list, verify)
"""


@dataclass(frozen=True, slots=True)
class Action:
    """An action: its usage after the command's name, and what it does."""

    usage: str
    says: str


ACTIONS: Final[Mapping[str, Action]] = {
    "list": Action(
        "list [JOB]",
        """\
A line for each job that has checkpoints on this disk, or for JOB only; exit code 4 if there are
none of it. Redis is not asked. The columns:

  id          of the job
  epoch       the attempts that left files, by number
  tokens      how many tokens can be read back from them
  size        what the files take
  time        of the newest checkpoint, or of the end
  state       how the job ended, if it did
  DAMAGED     which file, and why; `verify` reads everything
""",
    ),
    "verify": Action(
        "verify [JOB]",
        """\
Read every byte of every file, or of those of JOB only, against its checksums. Exit code 1 if a file
is damaged, 4 if there are none of JOB. A damaged file is never used: jobs go on from an older
checkpoint, or from their prompts. Redis is not asked.
""",
    ),
    "gc": Action(
        "gc [--dry-run]",
        """\
Remove the checkpoints of all jobs that are gone from Redis: deleted, or expired. Workers do so once
a minute. Nothing goes of a job that Redis has, or has lost without removing it, nor anything of
another Redis. It takes no JOB: `tenuto delete JOB` ends a single one.
""",
    ),
    "recover": Action(
        "recover [JOB] [--dry-run] [--force]",
        """\
Put all jobs back that Redis does not have, or JOB only, from this data dir: with their streams, and
with results where they had ended. What had not ended is queued again, and goes on bit for bit.
Exit code 1 if a job cannot be put back.

Jobs that another server has are left to it: the embedded server of this data dir while it runs, or
one that a living worker of this data dir serves. So are those that the embedded server may have,
which does not run, but has data: `tenuto server` starts it. With --force they are put back, too,
from a server that is gone for good. One that lives would run them as well, and lose their files
when they are deleted here, or expire.

Jobs that no worker had begun are not on disk: those are lost with Redis, and have to be submitted
again. Run it in each data dir, and before workers start on the empty Redis if there are several.
A job that was deleted, or had expired, comes back only if it is named, and its files are there yet.
""",
    ),
}


class Choose(argparse.Action):
    """Takes the action; a `--help` after it is about that one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        if isinstance(values, str):
            chosen = ACTIONS[values]
            parser.usage = f"{parser.prog} {chosen.usage} [--json] [connection]"
            parser.description, parser.epilog = chosen.says, None
