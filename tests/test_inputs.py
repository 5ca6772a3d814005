"""What the builder reads: formats, places, what is damaged, and records as they become token ids."""

from __future__ import annotations

import bz2
import functools
import gzip
import http.server
import io
import json
import lzma
import os
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_builder.inputs import input_streams, lines
from cache_builder.inputs.input_streams import file_system
from cache_builder.inputs.record import DEFAULT_FIELD_NAMES, FieldNames, Format, InputError, InputRecord
from cache_builder.inputs.records import encode_record, encode_usable_record, read_part, read_sources
from cache_builder.inputs.sources import Source, find_sources, split_source
from ssd.text.codec import TextCodec
from tests.reference.text import chat_examples

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi there"}
TEXTS = [f"document {number} of a few words" for number in range(50)]


def records(name: str | Path, format: Format = "auto", fields: FieldNames = DEFAULT_FIELD_NAMES) -> list[InputRecord]:
    return list(read_sources(find_sources([str(name)], format), lambda num_bytes: None, fields))


def texts(name: str | Path, **options: Any) -> list[str]:
    return [str((record.line or json.loads(record.text))["text"]) for record in records(name, **options)]


def jsonl(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def zst(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


TEXT_LINES = jsonl(*({"text": text} for text in TEXTS))


# -- formats ----------------------------------------------------------------------------------------------------------


def batch_line(custom_id: str, text: str) -> dict[str, Any]:
    body = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    return {"id": "x", "custom_id": custom_id, "response": {"status_code": 200, "body": body}, "error": None}


def test_a_batchs_two_files_are_joined(tmp_path: Path, codec: TextCodec) -> None:
    def request(custom_id: str, text: str) -> dict[str, Any]:
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}

    (tmp_path / "a_in.jsonl").write_bytes(jsonl(request("1", "hello"), request("2", "and?"), request("3", "bye")))
    failed = {"custom_id": "3", "response": None, "error": {"code": "expired"}}
    (tmp_path / "a_out.jsonl").write_bytes(jsonl(batch_line("2", "two"), batch_line("1", "hi there"), failed))
    (tmp_path / "b_in.jsonl.gz").write_bytes(gzip.compress(jsonl(request("1", "other"))))
    (tmp_path / "b_out.jsonl").write_bytes(jsonl(batch_line("1", "of b"), batch_line("9", "of nobody")))
    sources = find_sources([str(tmp_path)])
    assert [Path(source.name).name for source in sources] == ["a_out.jsonl", "b_out.jsonl"]
    read = [encode_record(record, codec) for record in read_sources(sources, lambda num_bytes: None)]
    assert [(each.has_prompt, each.has_answer) for each in read] == [(True, True)] * 2 + [
        (True, False),
        (True, True),
        (False, True),
    ]
    found = [example for each in read for example in each.examples]

    def chat(question: str, answer: str) -> Any:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return chat_examples(codec, turns)[0]

    assert found == [
        chat("and?", "two"),
        chat("hello", "hi there"),
        chat("other", "of b"),
        codec.encode_text_example("of nobody"),
    ]


def test_batches_that_number_alike_are_joined_in_pairs_or_not_at_all(tmp_path: Path, codec: TextCodec) -> None:
    for name in "ab":
        body = {"messages": [{"role": "user", "content": f"of {name}"}]}
        line = {"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
        (tmp_path / f"{name}_in.jsonl").write_bytes(jsonl(line))
        (tmp_path / f"{name}_out.jsonl").write_bytes(jsonl(batch_line("request-1", f"said {name}")))
    read = [encode_record(each, codec) for each in read_sources(find_sources([str(tmp_path)]), lambda num_bytes: None)]
    texts = [codec.decode([*each.examples[0].token_ids]) for each in read]
    assert all(f"of {name}" in text and f"said {name}" in text for name, text in zip("ab", texts, strict=True))
    (tmp_path / "a_out_errors.jsonl").write_bytes(jsonl(batch_line("request-9", "of nobody")))
    with pytest.raises(InputError, match="begin with the custom_id"):
        find_sources([str(tmp_path)])


def test_a_line_that_is_no_text_is_left_out_where_that_is_asked_for(tmp_path: Path, codec: TextCodec) -> None:
    good = b'{"prompt": "a", "completion": "b"}'
    bad = b'{"text": "caf\xe9"}'
    for number, content in enumerate((good + b"\n" + bad + b"\n" + good, b"[" + bad + b", " + good + b"]")):
        path = tmp_path / f"{number}.json"
        path.write_bytes(content)
        records = list(read_sources(find_sources([str(path)]), lambda num_bytes: None))
        used = [encode_usable_record(each, codec, DEFAULT_FIELD_NAMES, skip_invalid=True) for each in records]
        assert sum(each is not None for each in used) == len(used) - 1
        with pytest.raises(InputError, match="not UTF-8 text"):
            [encode_usable_record(each, codec, DEFAULT_FIELD_NAMES, skip_invalid=False) for each in records]
    body = {"messages": [{"role": "user", "content": "a"}]}
    asked = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_bytes(jsonl(asked))
    (tmp_path / "out.jsonl").write_bytes(jsonl(batch_line("1", "cafX")).replace(b"X", b"\xe9"))
    sources = find_sources([str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")])
    (record,) = read_sources(sources, lambda num_bytes: None)
    with pytest.raises(InputError, match="not UTF-8 text"):
        encode_record(record, codec)


# -- what a file is, whatever its name --------------------------------------------------------------------------------

CHAT = {"messages": [USER, ANSWER]}
THREE = jsonl(CHAT, CHAT, CHAT)


def tar(data: bytes, mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        member = tarfile.TarInfo("logs.jsonl")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def zipped(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("logs.jsonl", data)
    return out.getvalue()


def arrow(*, is_file: bool) -> bytes:
    out = io.BytesIO()
    table = pa.Table.from_pylist([{**CHAT, "image": b"x"}] * 3)
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *(
            (name, THREE)
            for name in ("requests.log", "requests.txt", "requests.jsonl.1", "run.traj", "file-abc", "a.md")
        ),
        ("requests.log-20260101.gz", gzip.compress(THREE)),
        ("comment.log", b"# exported\n\n" + THREE),
        ("array.log", json.dumps([CHAT] * 3, indent=1).encode()),
        ("logs.jsonl.xz", lzma.compress(THREE[:99]) + lzma.compress(THREE[99:])),
        ("logs.jsonl.bz2", bz2.compress(THREE[:99]) + bz2.compress(THREE[99:])),
        ("logs.jsonl.lz4", bytes(pa.compress(THREE, "lz4", asbytes=True))),
        ("hidden.jsonl", lzma.compress(THREE)),
        ("data.arrow", arrow(is_file=True)),
        ("cache.arrow", arrow(is_file=False)),
        ("no-name", arrow(is_file=False)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests_are_read_whatever_their_file_is_called(
    name: str, data: bytes, tmp_path: Path, codec: TextCodec
) -> None:
    (tmp_path / name).write_bytes(data)
    expected = chat_examples(codec, [USER, ANSWER])
    found = records(tmp_path / name)
    if name == "comment.log":
        with pytest.raises(InputError, match=r"comment\.log:1: the line is not JSON"):
            encode_record(found.pop(0), codec)
    assert [encode_record(record, codec).examples for record in found] == [expected] * 3


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("export.csv", b'prompt,completion\nWhere?,Here.\n"He said ""where?"",\nthen left.",No idea.\n'),
        ("export.tsv", b'prompt\tcompletion\r\nWhere?\tHere.\r\n"He said ""where?"",\nthen left."\tNo idea.\r\n'),
        ("excel.csv", b'\xef\xbb\xbfprompt;completion\nWhere?;Here.\n"He said ""where?"",\nthen left.";No idea.\n'),
        ("export.txt", b'id,prompt,completion\n1,Where?,Here.\n2,"He said ""where?"",\nthen left.",No idea.\n'),
    ],
)
def test_rows_of_csv_are_records(name: str, data: bytes, tmp_path: Path, codec: TextCodec) -> None:
    (tmp_path / name).write_bytes(data)
    pairs = [("Where?", "Here."), ('He said "where?",\nthen left.', "No idea.")]
    assert [encode_record(record, codec).examples for record in records(tmp_path / name)] == [
        [codec.encode_completion_example(*pair)] for pair in pairs
    ]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("logs.tar", tar(THREE), "is a tar archive"),
        ("logs.tar.gz", gzip.compress(tar(THREE)), "is a tar archive"),
        ("logs.tgz", tar(THREE, "w:gz"), "is a tar archive"),
        ("logs.jsonl", zipped(THREE), "is a zip archive"),
        ("log.eval", zipped(THREE), "is a zip archive"),
        ("logs.db", b"SQLite format 3\x00" + b"\x00" * 99, "is an SQLite database"),
        ("logs.bin", b"something\x00\x01", "binary data"),
        ("wide.jsonl", THREE.decode().encode("utf-16"), ":1: the text is UTF-16"),
        ("wide.txt", THREE.decode().encode("utf-16-le"), ":1: the text is UTF-16"),
        (
            "stream.txt",
            b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n',
            ":1: the line has other text before its JSON",
        ),
        (
            "events.log",
            b'event: message_start\ndata: {"type": "message_start"}\n\n',
            ":1: the line has other text before its JSON",
        ),
        ("container.log", b"2026-01-01T00:00:00Z stdout F " + THREE, ":1: the line has other text before its JSON"),
        ("python.log", str(CHAT).encode(), ":1: the line is not JSON"),
        ("export.csv", b"prompt,completion\na,b,c\n", "row 1 has more cells"),
        ("export.csv", b'prompt,completion\na,"b\n', "row 1 is not CSV"),
        ("export.csv", b"a,b\nc,d\n", 'row 1: the record has no usable fields .found: "a", "b"'),
    ],
)
def test_what_cannot_be_learned_is_refused_by_name(
    name: str, data: bytes, message: str, tmp_path: Path, codec: TextCodec
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message) as raised:
        [encode_record(record, codec) for record in records(tmp_path / name)]
    assert str(raised.value).startswith(str(tmp_path / name))


PRETTY = json.dumps(CHAT, indent=2).encode()


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (PRETTY, 1),
        (PRETTY + b"\n" + PRETTY, 2),
        (json.dumps({"data": [CHAT, CHAT]}).encode(), 2),
        (json.dumps({"status": "success", "samples": [CHAT, CHAT], "other": [{}]}, indent=2).encode(), 2),
        (b'{"traces": [\n' + json.dumps(CHAT).encode() + b",\n" + json.dumps(CHAT).encode() + b"\n]}\n", 2),
        (json.dumps({"log": {"version": "1", "entries": [CHAT] * 3}}, indent=2).encode(), 3),
        (json.dumps({"text": "a document", "data": [CHAT]}, indent=2).encode(), 1),
    ],
)
def test_an_object_over_several_lines_is_a_record_or_holds_them(
    data: bytes, count: int, tmp_path: Path, codec: TextCodec
) -> None:
    (tmp_path / "in.json").write_bytes(data)
    (source,) = find_sources([str(tmp_path / "in.json")])
    assert split_source(source, 10) == [(source, len(data))] or b"\n" not in data, "it is not cut"
    found = records(tmp_path / "in.json")
    assert len(found) == count
    text = [codec.encode_text_example("a document")]
    expected = text if b"a document" in data else chat_examples(codec, [USER, ANSWER])
    assert [encode_record(record, codec).examples for record in found] == [expected] * count


def test_a_line_that_is_cut_is_told_from_an_object_over_several_lines(tmp_path: Path, codec: TextCodec) -> None:
    (tmp_path / "in.json").write_bytes(b'{"messages": [{"role"\n' + THREE)
    with pytest.raises(InputError, match=r"in\.json:1: the line is not JSON"):
        [encode_record(record, codec) for record in records(tmp_path / "in.json")]
    (tmp_path / "in.json").write_bytes(PRETTY + PRETTY[:-9])
    with pytest.raises(InputError, match=r"in\.json is not JSON over several lines \("):
        records(tmp_path / "in.json")


# -- places -----------------------------------------------------------------------------------------------------------


def test_directories_and_patterns_give_each_file_once_in_order(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "a/1.jsonl.zst", "a/3.jsonl.gz", "c.jsonl", ".hidden/4.jsonl", "picture.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        data = jsonl({"text": name})
        path.write_bytes(zst(data) if name.endswith("zst") else gzip.compress(data) if name.endswith("gz") else data)
    assert texts(tmp_path) == ["a/1.jsonl.zst", "a/3.jsonl.gz", "b/2.jsonl", "c.jsonl"]
    assert texts(f"{tmp_path}/**/*.jsonl") == ["b/2.jsonl", "c.jsonl"]
    names = [f"{tmp_path}/c.jsonl", str(tmp_path), f"{tmp_path}/*.jsonl"]
    assert Path(find_sources(names)[0].name).name == "c.jsonl"
    assert len(find_sources(names)) == 4


def test_the_card_of_a_data_set_is_no_document(tmp_path: Path) -> None:
    import fsspec

    files = {
        "README.md": b"---\nlicense: mit\n---\n# Keys",
        "dataset_info.json": b'{"features": {}}',
        "state.json": b"{}",
        "data/a.jsonl": jsonl({"text": "first"}),
        "docs/README.md": b"# How to",
    }
    memory = fsspec.filesystem("memory")
    try:
        for name, data in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
            memory.pipe(f"/cards/{name}", data)
        for place in (str(tmp_path), "memory://cards"):
            names = [source.name.partition("/data/")[2] or Path(source.name).name for source in find_sources([place])]
            assert names == ["a.jsonl", "README.md"]
        assert len(find_sources([str(tmp_path / "README.md"), str(tmp_path)])) == 3, "it was named"
    finally:
        memory.rm("/cards", recursive=True)


def test_urls_are_read_as_files_are(tmp_path: Path) -> None:
    import fsspec

    (tmp_path / "in.jsonl").write_bytes(TEXT_LINES)
    assert texts(f"file://{tmp_path}/in.jsonl") == TEXTS
    assert texts(f"file://{tmp_path}/*.jsonl") == TEXTS
    memory = fsspec.filesystem("memory")
    memory.pipe("/logs/b.jsonl.zst", zst(TEXT_LINES))
    memory.pipe("/logs/a.jsonl", jsonl({"text": "first"}))
    memory.pipe("/logs/c.png", b"")
    try:
        assert texts("memory://logs") == ["first", *TEXTS]
        assert texts("memory://logs/*.zst") == TEXTS
        with pytest.raises(InputError, match="does not exist"):
            texts("memory://logs/none.jsonl")
    finally:
        memory.rm("/logs", recursive=True)


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="it is there")
def test_a_url_without_its_package_names_it() -> None:
    with pytest.raises(InputError, match="s3fs"):
        records("s3://bucket/logs.jsonl")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_web_server_is_read(web: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "in.jsonl").write_bytes(TEXT_LINES)
    (tmp_path / "in.jsonl.zst").write_bytes(zst(TEXT_LINES))
    assert texts(f"{web}/in.jsonl") == texts(f"{web}/in.jsonl.zst?key=1") == TEXTS
    with pytest.raises(InputError, match=r"none\.jsonl does not exist"):
        texts(f"{web}/none.jsonl")


def test_the_stamp_of_a_url_changes_with_its_file_and_every_time_where_nobody_can_tell(
    web: str, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "in.jsonl").write_bytes(TEXT_LINES)

    def stamp(url: str) -> str:
        return find_sources([url])[0].stamp

    before = stamp(f"{web}/in.jsonl")
    assert before == stamp(f"{web}/in.jsonl")
    os.utime(tmp_path / "in.jsonl", (1, 1))
    assert before != stamp(f"{web}/in.jsonl")
    memory = file_system("memory://")[0]
    memory.pipe("/in.jsonl", TEXT_LINES)
    try:
        assert stamp("memory://in.jsonl") != stamp("memory://in.jsonl")
    finally:
        memory.rm("/in.jsonl")


# -- damage -----------------------------------------------------------------------------------------------------------


def test_zstd_frames_follow_each_other_and_a_torn_one_is_noticed(tmp_path: Path) -> None:
    data = zst(TEXT_LINES) + zst(jsonl({"text": "second frame"}))
    (tmp_path / "two.jsonl.zst").write_bytes(data)
    assert texts(tmp_path / "two.jsonl.zst") == [*TEXTS, "second frame"]
    (tmp_path / "hidden.jsonl").write_bytes(data)
    assert texts(tmp_path / "hidden.jsonl") == [*TEXTS, "second frame"], "known by its first bytes"
    for size in (5, len(data) - 3, len(zst(TEXT_LINES)) - 1):
        (tmp_path / "torn.jsonl.zst").write_bytes(data[:size])
        with pytest.raises(InputError, match=r"torn\.jsonl\.zst contains damaged zstd data \(it ends too early\)"):
            texts(tmp_path / "torn.jsonl.zst")


def test_a_line_without_end_is_refused_whatever_it_was_packed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LONGEST_RECORD", 1 << 20)
    bomb = b"x" * (64 << 20)
    for name, packed in (("bomb.jsonl.zst", zst(bomb)), ("bomb.jsonl.gz", gzip.compress(bomb, 1))):
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(InputError, match=f"{name}:1: the line has more than 1 MiB"):
            records(tmp_path / name)


KINDS = ["a.parquet", "a.jsonl", "a.json", "a.jsonl.zst", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2", "a.arrow", "a.csv"]


def good_bytes(name: str) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"text": TEXTS[:5], "token_ids": [[1, 2], [3], [], [4], [5, 6]]})
    out = io.BytesIO()
    if name == "a.parquet":
        pa.parquet.write_table(table, out)
    elif name == "a.arrow":
        with pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    elif name == "a.csv":
        out.write(b'text,id\n"a\nb",1\nc,2\n')
    else:
        lines = [{"text": text} for text in TEXTS[:5]]
        data = json.dumps(lines).encode() if name == "a.json" else jsonl(*lines)
        packed = {".zst": zst, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
        out.write(packed.get(Path(name).suffix, bytes)(data))
    return out.getvalue()


@pytest.mark.parametrize("name", KINDS)
def test_damage_is_one_line_or_nothing(name: str, tmp_path: Path, codec: TextCodec) -> None:
    random = np.random.default_rng(1)
    good = good_bytes(name)
    path = tmp_path / name
    for _ in range(150):
        data = bytearray(good)
        kind = random.integers(4)
        if kind == 0:
            del data[int(random.integers(len(data))) :]
        elif kind == 1:
            data = bytearray(random.bytes(int(random.integers(1, 200))))
        else:
            for place in random.integers(len(data), size=int(random.integers(1, 6))):
                data[int(place)] = int(random.integers(256))
        path.write_bytes(bytes(data))
        try:
            for record in records(path):
                encode_record(record, codec)
        except InputError as error:
            assert str(path) in str(error)


# -- parts ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["", "a", "{}", "é" * 9, "x" * 40]), max_size=30), st.integers(1, 12), st.booleans())
def test_ranges_of_a_file_hold_every_line_once(found: list[str], count: int, has_end: bool) -> None:
    data = ("\n".join(found) + ("\n" if has_end else "")).encode()
    whole = [record.text.encode() for record in lines.json_lines("a", io.BytesIO(data))]
    assert "".join(map(bytes.decode, whole)).split() == data.decode().split()
    bounds = [len(data) * number // count for number in range(count)]
    parts = [
        record.text.encode()
        for start, stop in zip(bounds, [*bounds[1:], None], strict=True)
        for record in lines.json_lines("a", io.BytesIO(data), start, stop)
    ]
    assert parts == whole
    if data.strip():
        texts = [
            record.text
            for start, stop in zip(bounds, [*bounds[1:], None], strict=True)
            for record in lines.documents("a", io.BytesIO(data), start, stop)
        ]
        assert "".join(texts).split() == data.decode().split()


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet"])
def test_parts_of_a_file_hold_its_records_in_order(name: str, tmp_path: Path, codec: TextCodec) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    rows = [[number % 400, number % 7, 3] * (1 + number % 5) for number in range(400)]
    table = pa.table({"token_ids": rows})
    path = tmp_path / name
    if name == "in.parquet":
        pa.parquet.write_table(table, path, row_group_size=17)
    else:
        path.write_bytes(jsonl(*({"token_ids": row} for row in rows)))
    (source,) = find_sources([str(path)])
    for weight in (200, 1000, 1 << 30):
        parts = split_source(source, weight)
        assert len(parts) > 5 or weight > 200
        found = [
            encode_record(record, codec).examples[0].token_ids
            for part, _ in parts
            for record in read_part(part, lambda num_bytes: None)
        ]
        assert found == rows


def test_what_cannot_be_cut_stays_whole(tmp_path: Path) -> None:
    (tmp_path / "array.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(TEXT_LINES))
    (tmp_path / "lines.jsonl").write_bytes(TEXT_LINES)
    counts = {Path(s.name).name: len(split_source(s, 10)) for s in find_sources([str(tmp_path)])}
    assert counts["array.json"] == counts["packed.jsonl"] == 1 < counts["lines.jsonl"]
    assert split_source(Source("-", "auto", None, ""), 10)[0][0].stop is None
    assert input_streams.is_url("s3://a/b") and not input_streams.is_url("a/b") and not input_streams.is_url("C:/b")
