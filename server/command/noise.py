"""What coupled noise is made of, as the command line asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from server.command.arguments import Options
from server.tenants.secret import STATE_DIRECTORY
from ssd.sharing.noise_root import NoiseRoot

if TYPE_CHECKING:
    from ssd.sharing.noise_root import SharedRoot


class OpenNoise(NamedTuple):
    """``root`` : None where nothing is coupled. ``shared`` : keeps it the replicas', None where they have no say."""

    root: NoiseRoot | None = None
    shared: SharedRoot | None = None


def open_noise(options: Options, secret: bytes | None, on_close: Callable[..., object]) -> OpenNoise:
    """The root of the secret; else of the seed; else what replicas agree on; else the cache directory's, or random.

    ``secret`` : that was given. ``on_close`` : takes what is to be called at the end. Waits for the disk, never for
    Redis. Raises ConfigError.
    """
    cache = options.cache.config
    if not options.engine.config.coupled_streams:
        return OpenNoise()
    if secret is not None:
        return OpenNoise(NoiseRoot.of_secret(secret))
    if options.engine.seed is not None:
        return OpenNoise(NoiseRoot.of_seed(options.engine.seed))
    root = NoiseRoot.kept_at(None if cache.directory is None else cache.directory / STATE_DIRECTORY / "noise")
    if cache.redis_url is None:
        return OpenNoise(root)
    from ssd.sharing.noise_root import SharedRoot

    shared = SharedRoot(cache.redis_url, root)
    on_close(shared.close)
    return OpenNoise(root, shared)
