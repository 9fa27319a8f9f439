"""Ed25519 signatures of artifacts and of the answers of nodes. Needs cryptography.

Keys are PEM files: `openssl genpkey -algorithm ed25519 -out key.pem` makes one, `openssl pkey -in key.pem -pubout` its
public key.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlcn_jax.errors import InputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_MAKE = "openssl genpkey -algorithm ed25519 -out key.pem makes one, openssl pkey -in key.pem -pubout its public key"


def private_key(path: Path) -> "Ed25519PrivateKey":
    """Reads a private key; raises InputError if the file holds none, it is encrypted, or cryptography is missing."""
    _check_installed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    content = _read(path)
    try:
        key = serialization.load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path} is not an unencrypted private key ({error}): {_MAKE}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path} is not an Ed25519 key: {_MAKE}")
    return key


def public_keys(paths: Sequence[Path]) -> "list[Ed25519PublicKey]":
    """Reads public keys; raises InputError if a file holds none, or cryptography is missing."""
    _check_installed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    keys = []
    for path in paths:
        content = _read(path)
        try:
            key = serialization.load_pem_public_key(content)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InputError(f"{path} is not a public key ({error}): {_MAKE}") from error
        if not isinstance(key, Ed25519PublicKey):
            raise InputError(f"{path} is not an Ed25519 key: {_MAKE}")
        keys.append(key)
    return keys


def is_signed(content: bytes, signature: bytes, keys: "Sequence[Ed25519PublicKey]") -> bool:
    """Whether one of the keys signed the content."""
    from cryptography.exceptions import InvalidSignature

    for key in keys:
        try:
            key.verify(signature, content)
        except InvalidSignature:
            continue
        return True
    return False


def _check_installed() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise InputError(f"keys need the package cryptography ({error}): pip install 'mlcn_jax[tiers]'") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: {_MAKE}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): make it readable, or give another file") from error
