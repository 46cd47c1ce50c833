"""Programs: what they compile to, and what is said of wrong ones."""

from __future__ import annotations

import array
import doctest
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import crossweft as cw
import crossweft.language
from crossweft.language import (
    JSON,
    AlgoSpec,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Buffer,
    BufferType,
    CollectiveProgram,
    CustomCollective,
    Gather,
    LoopIterationContext,
    MemoryChannel,
    PortChannel,
    Rank,
    Reduce,
    ReduceOperationType,
    ReduceScatter,
    ReplicationPolicy,
    Scatter,
    Semaphore,
    SendRecv,
    SwitchChannel,
    TestCollective,
    ThreadBlockGroup,
)


def here() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def ints(*values: int) -> array.array[int]:
    return array.array("i", values)


def test_the_example_of_the_package() -> None:
    failed, tried = doctest.testmod(crossweft.language)
    assert failed == 0 and tried > 4


def all_gather(ranks: int, **options: object) -> CollectiveProgram:
    with CollectiveProgram("all-gather", AllGather(ranks, 2), ranks, **options) as program:
        for rank in range(ranks):
            mine = Rank(rank).get_input_buffer()[:]
            for peer in range(ranks):
                out = Rank(peer).get_output_buffer()[2 * rank : 2 * rank + 2]
                if peer == rank:
                    Rank(rank).copy(out, mine, tb=0)
                else:
                    MemoryChannel(peer, rank).put(out, mine, tb=peer % 2)
    return program


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_synchronisation_is_inserted(ranks: int) -> None:
    plan = cw.compile(all_gather(ranks))
    assert plan.check().ok and plan.collective == "all-gather" and plan.output_blocks == ranks
    inputs = [ints(*range(10 * rank, 10 * rank + 8)) for rank in range(ranks)]
    outputs = plan.run_local(inputs, seed=3)
    assert outputs == [ints(*(value for one in inputs for value in one))] * ranks


@pytest.mark.parametrize("policy", list(ReplicationPolicy))
def test_instances(policy: ReplicationPolicy) -> None:
    program = all_gather(2, instances=3, replication_policy=policy)
    plan = cw.compile(program)
    assert plan.thread_blocks == 3 * cw.compile(all_gather(2)).thread_blocks
    assert program.compile() == plan, "compiling changes nothing"
    inputs = [ints(*range(96)), ints(*range(100, 196))]
    assert plan.run_local(inputs) == [inputs[0] + inputs[1]] * 2


def test_groups_of_different_sizes_take_whole_slices() -> None:
    with CollectiveProgram("mixed", AllGather(2, 1), 2) as program:
        for rank in range(2):
            stage, (own,) = Buffer(rank, 1), Rank(rank).get_input_buffer()
            four, two = ThreadBlockGroup([0, 1, 2, 3]), ThreadBlockGroup([4, 5])
            Rank(rank).copy(stage[0], own, tb_group=four)
            Rank(rank).copy(Rank(rank).get_output_buffer()[rank], stage[0], tb_group=two)
            there = Rank(1 - rank).get_output_buffer()[rank]
            MemoryChannel(1 - rank, rank).put(there, stage[0], tb_group=two)
    plan = cw.compile(program)
    assert plan.message_multiple == 64
    for granules in (4, 8, 12, 20):
        inputs = [bytes([1 + rank] * 16 * granules) for rank in range(2)]
        for seed in range(10):
            assert plan.run_local(inputs, seed=seed) == [inputs[0] + inputs[1]] * 2
    # The third of four slices would be of the first of two.
    with pytest.raises(cw.UsageError, match="the plan takes multiples of 64"):
        plan.run_local([bytes(80)] * 2)


def test_packets_of_a_chunk_that_may_be_empty_tell_nothing() -> None:
    ranks = 4
    with CollectiveProgram("both ways", AllGather(ranks, 2), ranks) as program:
        # Chunk 0 goes around one way, chunk 1 the other.
        ways = [(0, 1), (1, -1)]
        inputs = [Rank(rank).get_input_buffer() for rank in range(ranks)]
        outputs = [Rank(rank).get_output_buffer() for rank in range(ranks)]
        slots = [Buffer(rank, 2 * ranks) for rank in range(ranks)]
        for rank in range(ranks):
            for chunk, step in ways:
                following, place = (rank + step) % ranks, 2 * rank + chunk
                Rank(rank).copy(outputs[rank][place], inputs[rank][chunk], tb=chunk)
                MemoryChannel(following, rank).put_packets(slots[following][place], inputs[rank][chunk], tb=chunk)
        for hop in range(1, ranks):
            for rank in range(ranks):
                for chunk, step in ways:
                    following, place = (rank + step) % ranks, 2 * ((rank - step * hop) % ranks) + chunk
                    if hop < ranks - 1:
                        channel = MemoryChannel(following, rank)
                        channel.read_put_packets(slots[following][place], slots[rank][place], tb=chunk)
                    Rank(rank).unpack_packets(outputs[rank][place], slots[rank][place], tb=chunk)
    plan = cw.compile(program)
    unique_id = cw.UniqueId()

    def rank_main(rank: int) -> None:
        communicator = cw.Communicator(rank, ranks, unique_id, timeout=30)
        prepared = plan.prepare(communicator, dtype="u8", max_bytes=1 << 16)
        for call in range(60):
            size = (1 << 16, 1, 100)[call % 3]
            output = bytearray(size * ranks)
            prepared.run(bytes([call + rank] * size), output)
            assert output == b"".join(bytes([call + other] * size) for other in range(ranks))

    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(rank_main, range(ranks)))


def test_buffers_end() -> None:
    with CollectiveProgram("three", AllGather(3, 1), 3):
        output = Rank(1).get_output_buffer()
        assert [str(chunk) for chunk in output] == [str(output[index]) for index in range(3)]


def test_reduce_scatter_of_packets_by_a_group() -> None:
    ranks = 3
    with CollectiveProgram("rs", ReduceScatter(ranks, 1), ranks, protocol="LL") as program:
        group = ThreadBlockGroup([0, 1])
        scratch = [Buffer(rank, ranks) for rank in range(ranks)]
        for rank in range(ranks):
            for peer in range(ranks):
                if peer != rank:
                    MemoryChannel(peer, rank).put_packets(
                        scratch[peer][rank], Rank(rank).get_input_buffer()[peer], tb_group=group
                    )
        for rank in range(ranks):
            others = [scratch[rank][peer] for peer in range(ranks) if peer != rank]
            Rank(rank).reduce(
                Rank(rank).get_input_buffer()[rank],
                others,
                tb_group=group,
                dst_chunk=Rank(rank).get_output_buffer()[0],
                packet=True,
            )
    plan = program.compile()
    inputs = [ints(*[(rank + 1) * 10**block for block in range(ranks) for _ in range(5)]) for rank in range(ranks)]
    assert plan.run_local(inputs) == [ints(*[6 * 10**rank] * 5) for rank in range(ranks)]


@pytest.mark.parametrize("op", ["sum", "max", None])
def test_all_reduce_in_place_by_reading(op: str | None) -> None:
    with CollectiveProgram("ar", AllReduce(2, 1, True), 2, reduce_op=op) as program:
        for rank in range(2):
            data, theirs = (Rank(r).get_input_buffer() for r in (rank, 1 - rank))
            channel = MemoryChannel(1 - rank, rank)
            words = {} if op is None else {"reduce_op": ReduceOperationType(op)}
            channel.reduce(data[rank], [theirs[rank]], tb=0, **words)
            channel.put(theirs[rank], data[rank], tb=0)
    plan = cw.compile(program)
    assert plan.in_place == "required" and plan.reduce_op == op
    expected = ints(5, 5) if op == "max" else ints(8, 8)
    assert plan.run_local([ints(3, 3), ints(5, 5)]) == [expected] * 2
    assert plan.run_local([ints(3, 3), ints(5, 5)], op=op) == [expected] * 2
    if op is None:
        assert plan.run_local([ints(3, 3), ints(5, 5)], op="avg") == [ints(4, 4)] * 2


@pytest.mark.parametrize("kind", [Broadcast, Gather, Scatter, Reduce])
@pytest.mark.parametrize("inplace", [False, True])
def test_collectives_with_a_root(kind: type, inplace: bool) -> None:
    ranks, root = 3, 1
    with CollectiveProgram("rooted", kind(ranks, 1, inplace, root), ranks) as program:
        ins = [Rank(rank).get_input_buffer() for rank in range(ranks)]
        outs = [Rank(rank).get_output_buffer() for rank in range(ranks)]
        for rank in range(ranks):
            if kind is Reduce:
                if rank != root:
                    scratch = Buffer(root, 1)
                    MemoryChannel(root, rank).put(scratch[0], ins[rank][0], tb=0)
                    other = ins[root][0] if rank == 0 else outs[root][0]
                    Rank(root).reduce(other, [scratch[0]], tb=0, dst_chunk=outs[root][0])
                continue
            source, target = (rank, root) if kind is Gather else (root, rank)
            src = ins[source][rank if kind is Scatter else 0]
            dst = outs[target][rank if kind is Gather else 0]
            if rank != root:
                MemoryChannel(target, source).put(dst, src, tb=0)
            elif not inplace:
                Rank(root).copy(dst, src, tb=0)
    plan = program.compile()
    count = ranks if kind is Scatter else 1
    inputs = [ints(*range(10 * rank, 10 * rank + count)) for rank in range(ranks)]
    outputs = plan.run_local(inputs)
    if kind is Broadcast:
        assert outputs == [ints(10)] * 3
    elif kind is Gather:
        assert outputs[root] == ints(0, 10, 20)
    elif kind is Scatter:
        assert outputs == [ints(10), ints(11), ints(12)]
    else:
        assert outputs[root] == ints(30)


def test_a_custom_collective_says_what_it_computes() -> None:
    def exchange(source: int) -> CollectiveProgram:
        with CollectiveProgram("exchange", CustomCollective(2, 2, 1), 2) as program:
            for rank in range(2):
                peer = 1 - rank
                out = Rank(peer).get_output_buffer()
                MemoryChannel(peer, rank).put(out[0], Rank(rank).get_input_buffer()[source], tb=0)
                program.expect(out[0], [Rank(rank).get_input_buffer()[1]])
        return program

    assert exchange(1).compile().run_local([ints(1, 2), ints(3, 4)]) == [ints(4), ints(2)]
    with pytest.raises(cw.CheckError) as error:
        exchange(0).compile()
    assert error.value.diagnostics[0].code == "post_condition"
    with CollectiveProgram("known", AllGather(2, 1), 2) as program:
        with pytest.raises(cw.ProgramError, match="known"):
            program.expect(Rank(0).get_output_buffer()[0], [])


def test_ports_semaphores_loops_and_switches() -> None:
    with CollectiveProgram("ring", SendRecv(3, 1), 3) as program:
        for rank in range(3):
            after = (rank + 1) % 3
            channel = PortChannel(after, rank)
            channel.put_with_signal(Rank(after).get_output_buffer()[:], Rank(rank).get_input_buffer()[:], tb=0)
        for rank in range(3):
            PortChannel((rank + 2) % 3, rank).wait(tb=0)
    inputs = [ints(1), ints(2), ints(3)]
    assert program.compile().run_local(inputs) == [ints(3), ints(1), ints(2)]

    with CollectiveProgram("pipeline", TestCollective(1, 1, 1), 1) as program:
        rank, scratch = Rank(0), Buffer(0, 1)
        full, free = Semaphore(0, 0), Semaphore(0, 1)
        with LoopIterationContext(unit=32, num_chunks=1):
            free.acquire(tb=0)
            rank.copy(scratch[0], rank.get_input_buffer()[0], tb=0)
            full.release(tb=0)
            full.acquire(tb=1)
            rank.copy(rank.get_output_buffer()[0], scratch[0], tb=1)
            free.release(tb=1)
    data = ints(*range(50))
    assert program.compile().run_local([data]) == [data]

    # Neighbours in a loop stay apart: together they would be cut into other pieces.
    with CollectiveProgram("neighbours", TestCollective(1, 2, 2), 1) as program:
        rank = Rank(0)
        with LoopIterationContext(unit=32, num_chunks=1):
            for chunk in range(2):
                rank.copy(rank.get_output_buffer()[chunk], rank.get_input_buffer()[chunk], tb=0)
    assert program.compile().run_local([data]) == [data]

    with CollectiveProgram("nvls", AllReduce(2, 1, True), 2) as program:
        switch = SwitchChannel([0, 1], BufferType.input)
        for rank in range(2):
            mine = Rank(rank).get_input_buffer()[rank]
            switch.at_rank(rank).reduce(rank, 1, mine, tb=0)
            switch.at_rank(rank).broadcast(mine, rank, 1, tb=0)
    assert program.compile().run_local([ints(1, 2), ints(10, 20)]) == [ints(11, 22)] * 2


def test_functions_and_specifications() -> None:
    def algorithm(spec: AlgoSpec, tb: int = 0) -> CollectiveProgram:
        with CollectiveProgram.from_spec(spec) as program:
            for rank in range(spec.world_size):
                for peer in range(spec.world_size):
                    out = Rank(peer).get_output_buffer()[rank]
                    source = Rank(rank).get_input_buffer()[peer]
                    if peer == rank:
                        Rank(rank).copy(out, source, tb=tb)
                    else:
                        MemoryChannel(peer, rank).put(out, source, tb=tb)
        return program

    spec = AlgoSpec("a2a", AllToAll(2, 1, False), 2, 2, False, max_message_size=1 << 20)
    plan = cw.compile(algorithm, spec, tb=1)
    assert plan.name == "a2a" and plan.message_bytes == (0, 1 << 19) and plan.thread_blocks == 1
    assert plan.run_local([ints(1, 2), ints(3, 4)]) == [ints(1, 3), ints(2, 4)]
    with pytest.raises(TypeError, match="for functions"):
        cw.compile(all_gather(2), spec)
    with pytest.raises(TypeError, match="not a NoneType"):
        cw.compile(lambda: None)  # type: ignore[arg-type,return-value]


def test_json_is_of_the_program_that_is_being_written() -> None:
    with CollectiveProgram("one", TestCollective(1, 1, 1), 1) as one:
        Rank(0).copy(Rank(0).get_output_buffer()[0], Rank(0).get_input_buffer()[0], tb=0)
        with CollectiveProgram("two", TestCollective(1, 1, 1), 1):
            assert cw.Plan.from_json(JSON()).name == "two"
        assert cw.Plan.from_json(JSON()) == one.compile()
    with pytest.raises(cw.ProgramError, match="no program here"):
        JSON()


def test_threads_write_programs_of_their_own() -> None:
    names = []

    def write(name: str) -> None:
        with CollectiveProgram(name, TestCollective(1, 1, 1), 1):
            met.wait()
            names.append((name, cw.Plan.from_json(JSON()).name))

    met = threading.Barrier(2)
    threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == [("a", "a"), ("b", "b")]


def test_a_wrong_line_is_named() -> None:
    def refused(match: str) -> pytest.RaisesContext[cw.ProgramError]:
        return pytest.raises(cw.ProgramError, match=match)

    with CollectiveProgram("wrong", AllGather(2, 1), 2):
        with refused("no rank 2") as error:
            line = here() + 1
            Rank(2)
        assert (error.value.file, error.value.line) == (__file__, line)
        assert str(error.value).startswith(f"{__file__}:{line}: ")
        rank = Rank(0)
        data, out = rank.get_input_buffer(), rank.get_output_buffer()
        with refused("chunks 1 to 3") as error:
            line = here() + 1
            rank.copy(out[1:3], out[0:2], tb=0)
        assert error.value.line == line
        for match, wrong in [
            ("step of 2", lambda: out[0:2:2]),
            ("no chunks -1", lambda: out[-1]),
            ("no chunks 1 to 0", lambda: out[1:0]),
            ("either tb", lambda: rank.copy(out[0], data[0])),
            ("either tb", lambda: rank.copy(out[0], data[0], tb=1, tb_group=ThreadBlockGroup([1]))),
            ("twice", lambda: ThreadBlockGroup([1, 1])),
            ("2 chunks", lambda: rank.copy(out[0:2], data[0], tb=0)),
            ("not of rank 0", lambda: rank.copy(Rank(1).get_output_buffer()[0], data[0], tb=0)),
            ("nothing to reduce with", lambda: rank.reduce(out[0], [], tb=0)),
            (
                "reduces by max",
                lambda: rank.reduce(out[0], [out[1]], tb=0, reduce_op=ReduceOperationType.max),
            ),
            ("not to be written", lambda: rank.copy(data[0], out[0], tb=0)),
            ("not a member", lambda: SwitchChannel([1], BufferType.input).at_rank(0)),
            ("multiple of 16", lambda: LoopIterationContext(7, 1).__enter__()),
        ]:
            with refused(match) as error:
                wrong()
            assert error.value.file == __file__ and error.value.line is not None
        with pytest.raises(OverflowError):
            Rank(-1)
    with refused("no protocol"):
        CollectiveProgram("wrong", AllGather(2, 1), 2, protocol="HTTP")
    with refused("3 ranks"):
        CollectiveProgram("wrong", AllGather(3, 1), 2)
    with refused("instances"):
        CollectiveProgram("wrong", AllGather(2, 1), 2, instances=0)


def test_the_checker_names_the_line() -> None:
    with CollectiveProgram("forgetful", AllGather(2, 1), 2) as program:
        for rank in range(2):
            out = Rank(rank).get_output_buffer()
            scratch = Buffer(rank, 1)
            Rank(rank).copy(out[rank], Rank(rank).get_input_buffer()[0], tb=0)
            line = here() + 1
            Rank(rank).copy(out[1 - rank], scratch[0], tb=0)
    with pytest.raises(cw.CheckError) as error:
        cw.compile(program)
    first = error.value.diagnostics[0]
    assert first.code == "uninitialised" and (first.file, first.line) == (__file__, line)
    assert (error.value.file, error.value.line) == (__file__, line)
    assert f"{__file__}:{line}: uninitialised" in str(error.value)


def test_without_auto_sync_a_missing_wait_is_named() -> None:
    with CollectiveProgram("silent", AllGather(2, 1), 2, auto_sync=False) as program:
        for rank in range(2):
            mine = Rank(rank).get_input_buffer()[0]
            Rank(rank).copy(Rank(rank).get_output_buffer()[rank], mine, tb=0)
            MemoryChannel(1 - rank, rank).put(Rank(1 - rank).get_output_buffer()[rank], mine, tb=0)
    with pytest.raises(cw.CheckError) as error:
        cw.compile(program)
    assert any(found.file == __file__ and found.line for found in error.value.diagnostics)


def test_a_race_names_both_lines() -> None:
    with CollectiveProgram("race", TestCollective(1, 2, 1), 1, auto_sync=False) as program:
        rank = Rank(0)
        out, data = rank.get_output_buffer(), rank.get_input_buffer()
        first = here() + 1
        rank.copy(out[0], data[0], tb=0)
        rank.copy(out[0], data[1], tb=1)
    with pytest.raises(cw.CheckError) as error:
        program.compile()
    found = error.value.diagnostics[0]
    assert found.code == "race" and {found.line, found.other_line} == {first, first + 1}
    assert found.other_file == __file__


def test_lines_of_operations() -> None:
    with CollectiveProgram("lines", TestCollective(1, 2, 2), 1) as program:
        rank = Rank(0)
        line = here() + 1
        rank.copy(rank.get_output_buffer()[0], rank.get_input_buffer()[1], tb=0)
    plan = program.compile()
    assert plan.source(0, 0, 0) == (__file__, line)
    assert plan.source(0, 0, 99) is None
    assert cw.Plan.from_json(plan.to_json()).source(0, 0, 0) is None
