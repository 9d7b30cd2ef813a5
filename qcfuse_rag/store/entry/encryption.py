"""Encryption at rest: AES-256-GCM with a key of its own for every entry.

The entry's key is derived from the store's secret and 32 random bytes in the entry (HKDF-SHA256, RFC 5869), so nonces
can be plain counters: nothing is ever encrypted twice under one key. GCM (NIST SP 800-38D) also proves that nobody
without the secret has changed a byte, which a checksum cannot.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field

from qcfuse_rag.errors import CorruptEntry, StoreError

TAG_BYTES = 16
SALT_BYTES = 32
MIN_SECRET_BYTES = 16
PROOF_TEXT = "qcfuse-rag proof"
"""What is hashed under a secret to prove it, and is no tenant's name for that reason."""


@dataclass(frozen=True)
class StoreCipher:
    """Encrypts and decrypts entries under a secret.

    Attributes:
        secret: at least 16 random bytes, from configuration or a key service; whoever loses it loses the store, and
            destroying it wipes the store.

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
        """What only this secret gives and what does not give the secret away: 32 hexadecimal digits."""
        key = hashlib.blake2b(self.secret, digest_size=64).digest()
        return hashlib.blake2b(PROOF_TEXT.encode(), key=key, digest_size=16).hexdigest()

    def new_entry(self) -> tuple[bytes, EntryCipher]:
        """Return fresh salt and the seal of an entry to be written."""
        salt = os.urandom(SALT_BYTES)
        return salt, self.entry(salt)

    def entry(self, salt: bytes) -> EntryCipher:
        """Return the seal of the entry that holds this salt."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            raise StoreError("encryption needs `pip install 'qcfuse-rag[encryption]'`") from error
        key = HKDF(algorithm=SHA256(), length=32, salt=salt, info=b"qcfuse-rag entry").derive(self.secret)
        return EntryCipher(AESGCM(key))


class EntryCipher:
    """Encrypts and decrypts the numbered parts of one entry."""

    def __init__(self, cipher: object) -> None:
        self._cipher = cipher

    def close(self, number: int, data: bytes | bytearray | memoryview, context: bytes = b"") -> bytes:
        """Encrypt part `number`, which must not have been encrypted before; 16 bytes longer than `data`."""
        return bytes(self._cipher.encrypt(number.to_bytes(12, "big"), bytes(data), context))  # type: ignore[attr-defined]

    def open(self, number: int, data: bytes | bytearray | memoryview, context: bytes = b"") -> bytearray:
        """Decrypt part `number`.

        Raises:
            CorruptEntry: if it was changed, or encrypted under another secret.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return bytearray(self._cipher.decrypt(number.to_bytes(12, "big"), bytes(data), context))  # type: ignore[attr-defined]
        except InvalidTag as error:
            raise CorruptEntry("cannot be decrypted: changed, or written under another secret") from error
