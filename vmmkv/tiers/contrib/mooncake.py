"""MooncakeTier: records in a Mooncake store."""

import os
import re
import socket
import threading
from collections.abc import Sequence
from typing import Any, Final

from vmmkv.tiers.record import RECORD_BYTES
from vmmkv.tiers.shared import Refused, SharedTier, client_of
from vmmkv.tiers.threaded import MissedError
from vmmkv.units import MIB


class MooncakeTier(SharedTier):
    """Records in a Mooncake store, by its master: `mooncake://host:50051`.

    The memory is that of `mooncake_client` processes; an engine lends none, so its end loses nothing. Mooncake's variables
    `MOONCAKE_PROTOCOL` (tcp or rdma), `MOONCAKE_DEVICE` and `MOONCAKE_LOCAL_HOSTNAME` say how to reach them.
    Raises: ValueError for another URL; TierUnavailable without `mooncake-transfer-engine-non-cuda`, or libibverbs.
    """

    name = "mooncake"

    def __init__(self, url: str, *, timeout_s: float = 2.0, record_bytes: int = RECORD_BYTES) -> None:
        found = re.fullmatch(r"mooncake://([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})/?", url)
        if found is None:
            raise ValueError("this is no URL of a Mooncake master; write mooncake://host:50051")
        self._module = client_of("mooncake.store", "mooncake")
        self._address: Final = f"{found[1]}:{found[2]}"
        super().__init__(f"mooncake at {self._address}", timeout_s=timeout_s, record_bytes=record_bytes)
        self._master: Final = (found[1].strip("[]"), int(found[2]))
        self._store: Any = None
        self._connecting = threading.Lock()

    def ask(self, names: Sequence[str]) -> list[bool]:
        """Ask which of these values are there. Raises OSError for an error of the store."""
        found = self._connected().batch_is_exist([*names] or ["vmmkv"])
        if min(found) < 0:
            raise OSError(f"{self.where}: error {min(found)}")
        return [bool(each) for each in found[: len(names)]]

    def get(self, name: str) -> Any:
        """A value, as a buffer; an empty one for a value of another length. Raises MissedError if it is not there."""
        value = self._connected().get_buffer(name)
        if value is not None:
            return value
        size_bytes = self._connected().get_size(name)
        if size_bytes >= 0 and size_bytes != self.value_bytes:
            return b""  # it does not fit into the client's buffer
        self.ask([])  # or does the master not answer?
        raise MissedError(name)

    def put(self, name: str, header: bytes, record: memoryview) -> None:
        """Put a value of two parts. Raises Refused if the store answers and does not take it."""
        error = self._connected().put_parts(name, header, record)
        if error:
            self.ask([])
            raise Refused(f"error {error}")

    def remove(self, name: str) -> None:
        """Delete a value, also while it is leased."""
        self._connected().remove(name, force=True)

    def close(self) -> None:
        """End the tier and close the client. See SharedTier.close."""
        super().close()
        if self._store is not None:
            self._store.close()
            self._store = None

    def _connected(self) -> Any:
        with self._connecting:
            if self._store is None:
                self._connect()
            return self._store

    def _connect(self) -> None:
        """Connect to the store. Raises: OSError if the master does not answer."""
        most_s = max(1, round(self.timeout_s))
        for variable, value in (
            ("MC_RPC_TIMEOUT_MS", 1000 * most_s),  # the client has no other way to set these
            ("MC_RPC_CONNECT_TIMEOUT_MS", 1000 * most_s),
            ("MC_TCP_PROGRESS_TIMEOUT_SEC", most_s),
            ("MC_STORE_CLIENT_SETUP_RETRIES", 1),
        ):
            os.environ.setdefault(variable, str(value))
        with socket.create_connection(self._master, timeout=self.timeout_s) as connection:
            own_address = connection.getsockname()[0]
        store = self._module.MooncakeDistributedStore()
        error = store.setup(
            local_hostname=os.environ.get("MOONCAKE_LOCAL_HOSTNAME", own_address),
            metadata_server="P2PHANDSHAKE",
            global_segment_size=0,
            local_buffer_size=64 * MIB,
            protocol=os.environ.get("MOONCAKE_PROTOCOL", "tcp"),
            rdma_devices=os.environ.get("MOONCAKE_DEVICE", ""),
            master_server_addr=self._address,
        )
        if error:
            raise OSError(f"{self.where}: error {error} while connecting")
        self._store = store
