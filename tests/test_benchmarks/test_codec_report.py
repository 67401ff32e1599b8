from benchmarks import checkpoints
from benchmarks.codec_cases import Case
from benchmarks.codec_goals import goals
from benchmarks.codec_measures import Measures, Scaling, Spread
from benchmarks.codec_report import Report, by_coder

BLOSC2 = "Blosc2 zstd-1 shuffle"


def measured(run="resnet_sgd", *, delta=100, encode=1.0):
    """Sizes of 200 raw bytes; peers need 110 bytes and 1.6 seconds."""
    measures = Measures(Case(run, "weights", "late", 10), 200, bound=2.0)
    measures.add("delta", delta, encode=encode, decode=1.0)
    measures.add("index", 180, encode=1.0, decode=1.0)
    for name in ("ZipNN / xor", f"{BLOSC2} / difference", "pcodec-8 / raw"):
        measures.add(name, 110, encode=1.6, decode=1.0)
    measures.add("ZipNN / raw", 190, encode=1.0, decode=1.0)
    return measures


def by_figure(found):
    return {(goal.against, goal.figure): goal for goal in found}


def test_goals_compare_ratio_and_speed_with_the_named_feed():
    found = by_figure(goals([measured()], None))
    assert found["ZipNN / xor", "ratio"].got.mean == 1.1
    assert found["ZipNN / xor", "encode"].reached
    assert found["order-0 bound", "ratio, each case"].reached
    assert not found["pcodec-8", "encode"].reached


def test_goals_worse_result_is_not_reached():
    found = by_figure(goals([measured(delta=109, encode=2.0)], None))
    assert not found["ZipNN / xor", "ratio"].reached
    assert not found["ZipNN / xor", "encode"].reached
    assert not found["order-0 bound", "ratio, each case"].reached


def test_goals_tuned_cases_do_not_count():
    assert {goal.against for goal in goals([measured("vgg_sgd")], None)} == {"raw"}


def test_goals_bound_is_judged_by_the_worst_case():
    found = by_figure(goals([measured(delta=90), measured(delta=90), measured(delta=105)], None))
    goal = found["order-0 bound", "ratio, each case"]
    assert goal.got.mean > 1
    assert not goal.reached


def test_goals_payload_larger_than_raw_is_not_reached():
    assert by_figure(goals([measured()], None))["raw", "ratio, each case"].reached
    assert not by_figure(goals([measured(delta=201)], None))["raw", "ratio, each case"].reached


def test_goals_processes_are_judged_by_the_wall():
    scaling = Scaling(Case("gpt_fp32", "weights", "early", 10), 1.0, 1.4, Spread(1.4, 1, 2), 1.9)
    assert [goal.reached for goal in goals([], scaling)] == [False]


def test_best_of_a_peer_is_the_feed_with_the_best_ratio():
    assert measured().best("ZipNN")[0] == "ZipNN / xor"


def test_by_coder_gives_best_feed_and_each_other_feed_once():
    rows = [(name, feeds) for name, feeds, _ in by_coder([measured(), measured("resnet_adam")])]
    assert ("ZipNN", "xor") in rows
    assert ("ZipNN", "always raw") in rows
    assert ("ZipNN", "always xor") not in rows
    assert ("delta", "") in rows


def test_report_write_makes_page_and_small_plots(cached_run, tmp_path):
    taken = [measured()]
    run = checkpoints.find("vgg_sgd", cached_run())
    report = Report("2 cores", [run], taken, None, goals(taken, None), 5)
    report.write(tmp_path / "docs")
    page = (tmp_path / "docs" / "codecs.md").read_text()
    assert "| fp32 weights | ZipNN / xor: ratio | 1.060 | 1.1 [1.1..1.1] | reached | 1 |" in page
    assert "fp32 weights, held out (1 cases)" in page
    assert "codecs_encode.png" in page
    assert (tmp_path / "docs" / "codecs_decode.png").stat().st_size < 150_000
