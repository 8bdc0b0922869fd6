"""The worker: takes queued generations, decodes them with MLX, publishes every token.

It is run as `tenuto worker`. As a library it has a supervisor to start one from Python:

    settings = WorkerSettings(models={"m": "/models/m"}, redis_url=url, data_dir=folder)
    code = Supervisor(settings, take_identity(settings.data_dir)).run()
"""

from ._errors import BadJob, ConfigError, RedisUnavailable, StartError, WorkerError
from ._identity import Identity, take_identity
from ._settings import WorkerSettings
from ._supervisor import Supervisor

__all__ = [
    "BadJob",
    "ConfigError",
    "Identity",
    "RedisUnavailable",
    "StartError",
    "Supervisor",
    "WorkerError",
    "WorkerSettings",
    "take_identity",
]
