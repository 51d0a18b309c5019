from sdsie_sglang.demo.chart import entropy_strip, gear_strip, wrapped


def test_strips_show_height_and_gear():
    assert entropy_strip([0.0, 3.0, 6.0, 99.0]) == " ▄██"
    assert gear_strip([5, 0, 7]) == "5·7"


def test_wrapped_lines_stay_below_each_other():
    assert wrapped(["abcde", "12345"], 3) == ["abc", "123", "de", "45"]
