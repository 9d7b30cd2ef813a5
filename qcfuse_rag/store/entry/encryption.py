"""Encryption at rest: AES-256-GCM with a separate key for every entry.

The entry's key is derived from the store's secret and 32 random bytes in the entry (HKDF-SHA256, RFC 5869), so nonces
can be plain counters: no key encrypts two different texts under one nonce. GCM (NIST SP 800-38D) also detects changes
by anybody without the secret, which a checksum cannot.

The secret alone decides whether entries are encrypted. Nothing that lies in a store's folder can switch that off.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field

from qcfuse_rag.errors import CorruptEntry, StoreError

TAG_BYTES = 16
SALT_BYTES = 32
MIN_SECRET_BYTES = 16
SECRET_VARIABLE = "QCFUSE_SECRET"
"""Environment variable with the secret that encrypts entries, for programs that give none."""
TENANT_SECRET_VARIABLE = "QCFUSE_TENANT_SECRET"
"""Environment variable with a secret that names tenants and encrypts nothing."""
PROOF_TEXT = "qcfuse-rag proof"
"""Text whose hash under a secret proves the secret; no tenant may have this name, since names are hashed as well."""


@dataclass(frozen=True)
class StoreCipher:
    """Encrypts and decrypts entries under a secret.

    Attributes:
        secret: at least 16 random bytes, from configuration or a key service. Without it the store cannot be read:
            losing it loses the store, and destroying it wipes the store.

    Raises:
        StoreError: if the secret is too short, or `cryptography` is not installed.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES:
            raise StoreError(f"the secret has {len(self.secret)} bytes; give at least {MIN_SECRET_BYTES} random ones")
        self.entry(bytes(SALT_BYTES))

    @property
    def proof(self) -> str:
        """32 hexadecimal digits that follow from the secret and do not reveal it."""
        key = hashlib.blake2b(self.secret, digest_size=64).digest()
        return hashlib.blake2b(PROOF_TEXT.encode(), key=key, digest_size=16).hexdigest()

    def new_entry(self) -> tuple[bytes, EntryCipher]:
        """Return new salt and the cipher of an entry to be written."""
        salt = os.urandom(SALT_BYTES)
        return salt, self.entry(salt)

    def entry(self, salt: bytes) -> EntryCipher:
        """Return the cipher of the entry with this salt."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            raise StoreError("encryption needs `pip install 'qcfuse-rag[encryption]'`") from error
        key = HKDF(algorithm=SHA256(), length=32, salt=salt, info=b"qcfuse-rag entry").derive(self.secret)
        return EntryCipher(AESGCM(key))


def environment_secret() -> bytes | None:
    """Return the secret in the environment variable QCFUSE_SECRET; None if it is not set.

    Raises:
        StoreError: if QCFUSE_TENANT_SECRET is set too: one of them would not be used.
    """
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is not None and TENANT_SECRET_VARIABLE in os.environ:
        raise StoreError(f"set {SECRET_VARIABLE} to encrypt or {TENANT_SECRET_VARIABLE} to name tenants, not both")
    return None if secret is None else os.fsencode(secret)


def environment_cipher() -> StoreCipher | None:
    """Return the cipher of the secret in QCFUSE_SECRET; None if it is not set. See `environment_secret` for errors."""
    secret = environment_secret()
    return None if secret is None else StoreCipher(secret)


class EntryCipher:
    """Encrypts and decrypts the numbered parts of one entry."""

    def __init__(self, aes_gcm: object) -> None:
        self._aes_gcm = aes_gcm

    def encrypt(self, number: int, data: bytes | bytearray | memoryview, context: bytes = b"") -> bytes:
        """Encrypt part `number`, once only; the result is 16 bytes longer than `data`."""
        return bytes(self._aes_gcm.encrypt(number.to_bytes(12, "big"), bytes(data), context))  # type: ignore[attr-defined]

    def decrypt(self, number: int, data: bytes | bytearray | memoryview, context: bytes = b"") -> bytearray:
        """Decrypt part `number`; raises `CorruptEntry` if the part was changed, or encrypted under another secret."""
        from cryptography.exceptions import InvalidTag

        try:
            return bytearray(self._aes_gcm.decrypt(number.to_bytes(12, "big"), bytes(data), context))  # type: ignore[attr-defined]
        except InvalidTag as error:
            raise CorruptEntry("cannot be decrypted: changed, or written under another secret") from error
