"""Import of kopf without the package kubernetes.

kopf imports the package kubernetes if it is installed, so that handlers can use its object classes. No handler here
uses these classes, and the import would delay the start of an operator, which may have to recover jobs. The operator's
image does not contain the package, but the environment of the local cluster does.
"""

from __future__ import annotations

import sys

NAME = "kubernetes"
_before = sys.modules.get(NAME)
sys.modules[NAME] = None  # type: ignore[assignment] # an import then fails as if the package were not installed
try:
    import kopf as kopf
finally:
    del sys.modules[NAME]
    if _before is not None:
        sys.modules[NAME] = _before
