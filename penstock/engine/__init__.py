"""Text generation: engines behind the `Engine` port.

`EmbeddedEngineConfig` builds the engine that needs nothing but torch. Importing this package imports no torch.
"""

from penstock.engine.config import EmbeddedEngineConfig

__all__ = ["EmbeddedEngineConfig"]
