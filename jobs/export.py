"""Write an output's shards as the files of a trainer.

python jobs/export.py output.path=/nvme/hs export.to=speculators export.path=/nvme/spec
"""

import _checkout  # noqa: F401  (makes the clone importable)

from hs_ray.config import ExportJob, run_job
from hs_ray.errors import ConfigError
from hs_ray.export import export


def main(job: ExportJob) -> int:
    if not job.export.path:
        raise ConfigError(
            "export.path = null: a local folder for the trainer's files; for example export.path=/nvme/train"
        )
    if "://" in job.export.path:
        raise ConfigError(f"export.path = {job.export.path}: a local folder; trainers read their files from a disk")
    note = export(
        str(job.output.path),
        job.export.to.value,
        job.export.path,
        workers=job.export.workers,
        incomplete=job.export.incomplete,
        draft_vocab_size=job.export.draft_vocab_size,
        storage_options=job.output.storage_options,
        log=lambda line: print(line, flush=True),
    )
    print(f"{note['target']}: {note['samples']:,} samples in {job.export.path}")
    return 0


if __name__ == "__main__":
    run_job(ExportJob, "export", main)
