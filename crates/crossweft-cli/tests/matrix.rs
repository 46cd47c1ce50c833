//! `crossweft matrix`: every pair of circumstances, as threads and a part of it as processes.
#![allow(clippy::unwrap_used)]

mod common;

use std::process::Output;

use common::text;

fn matrix(arguments: &str) -> Output {
    let arguments = ["matrix"].into_iter().chain(arguments.split_whitespace());
    common::crossweft(arguments).output().unwrap()
}

/// The closing line of a run in which nothing was wrong.
fn closing_line(arguments: &str) -> String {
    let output = matrix(arguments);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments}: {errors}");
    let line = text(&output.stdout);
    assert!(line.contains("none wrong"), "{line}");
    line
}

/// How many cases a closing line speaks of: done, and in all.
fn cases(line: &str) -> (usize, usize) {
    let mut numbers = line.split_whitespace().filter_map(|word| word.parse().ok());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

#[test]
fn every_pair_of_circumstances() {
    let line = closing_line("--pairwise");
    let (done, all) = cases(&line);
    assert_eq!(done, all);
    // As many pairs as there are of types and algorithms need that many cases at least.
    assert!(done >= 14 * 8, "{line}");
    assert!(line.contains("at 1 to 8 ranks"), "{line}");
}

#[test]
fn some_of_them_as_processes() {
    let line = closing_line("--pairwise --processes --ranks 2..4");
    let (done, all) = cases(&line);
    assert_eq!(done, all);
    // World sizes and types.
    assert!(done >= 3 * 14, "{line}");
}

#[test]
fn a_part_and_what_follows_it() {
    let of = "--ranks 2 --collective scatter --algorithm staged --dtype u8";
    let all = cases(&closing_line(of)).0;
    // Sizes, places, memories.
    assert_eq!(all, 5 * 2 * 2);
    assert_eq!(cases(&closing_line(&format!("{of} --limit 7"))).0, 7);
    let none = matrix(&format!("{of} --op sum"));
    assert_eq!(none.status.code(), Some(2));
    assert_eq!(text(&none.stderr), "error: there are no such cases\n");
}

#[test]
fn mistakes_are_exit_code_2() {
    for (arguments, words) in [
        ("--ranks 9", "give 1 to 8, or a range"),
        ("--ranks 4..2", "give 1 to 8, or a range"),
        ("--collective scan", "there are all-reduce, all-gather"),
        ("--algorithm tree", "there are auto, one-shot"),
    ] {
        let output = matrix(arguments);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {errors}");
        assert!(errors.contains(words), "{arguments}: {errors}");
    }
}

#[test]
fn what_was_not_tried_is_not_called_right() {
    let arguments = "matrix --device cuda --ranks 2 --collective scatter --dtype u8";
    let mut command = common::crossweft(arguments.split_whitespace());
    let output = command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let line = text(&output.stdout);
    assert_eq!(cases(&line).0, 0, "{line}");
    assert!(
        line.contains("not ended: stopped among those of 2 ranks") && !line.contains("none wrong"),
        "{line}"
    );
}
