"""Text that the demo and the tests train on."""

import hashlib

from concertina.demo import text


def test_it_is_the_same_bytes_on_every_machine_and_python(tmp_path):
    files = text.write(tmp_path, 3, 1000)
    assert {file.stat().st_size for file in files} == {1000}
    whole = b"".join(file.read_bytes() for file in files)
    assert hashlib.sha256(whole).hexdigest() == "c7e1cd8b48f226e43be57b79632673f5f623c5141ab453fb1d9496fa712382e8"
    assert len(set(whole.split(b" "))) > 100
