//! One entry point of a module by itself: drivers compile a module as a whole, and most of that time is for entry points
//! that nobody may ask for.

use std::collections::{BTreeMap, BTreeSet};

/// What all names of our functions and entry points begin with.
const PREFIX: &str = "crossweft_";

/// The text with `entry` as its only entry point, and only the functions that it calls. `None` if it has none of that name.
///
/// Of texts as `cargo xtask kernels` writes them: functions and entry points begin lines, and follow what they share.
pub(crate) fn part(ptx: &str, entry: &str) -> Option<String> {
    let begins: Vec<usize> = begins(ptx).collect();
    let head = &ptx[..*begins.first()?];
    let ends = begins.iter().skip(1).copied().chain([ptx.len()]);
    let items = begins.iter().zip(ends).filter_map(|(&begin, end)| {
        let text = &ptx[begin..end];
        Some((names(text).next()?, text))
    });
    let items: Vec<(&str, &str)> = items.collect();
    // A function that is called before it is defined is declared first, so a name may have two texts.
    let mut calls: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for &(name, text) in &items {
        calls.entry(name).or_default().extend(names(text));
    }
    let (&entry, _) = calls.get_key_value(entry)?;
    let mut kept = BTreeSet::from([entry]);
    let mut new = vec![entry];
    while let Some(name) = new.pop() {
        for &called in calls.get(name).into_iter().flatten() {
            if calls.contains_key(called) && kept.insert(called) {
                new.push(called);
            }
        }
    }
    let wanted = items.iter().filter(|(name, _)| kept.contains(name));
    Some(head.to_owned() + &wanted.map(|(_, text)| *text).collect::<String>())
}

/// Where functions and entry points begin.
fn begins(ptx: &str) -> impl Iterator<Item = usize> {
    let lines = ptx.match_indices("\n.").map(|(at, _)| at + 1);
    lines.filter(|&at| {
        let line = &ptx[at..];
        let line = line.strip_prefix(".visible ").unwrap_or(line);
        line.starts_with(".func ") || line.starts_with(".entry ")
    })
}

/// The names in a text that may be of functions or entry points.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices(PREFIX).map(|(at, _)| {
        let name = &text[at..];
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        &name[..name.find(|c| !is_part(c)).unwrap_or(name.len())]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
// crossweft_f9: not a function
.version 7.8
.shared .align 16 .b8 crossweft_state[40];
.visible .func  (.param .b32 func_retval0) crossweft_f1
(
.param .b32 crossweft_f1_param_0
)
;
.visible .func crossweft_f2(
)
{
call.uni (retval0), crossweft_f1, (param0);
}
.func crossweft_f11(
)
{
ret;
}
.visible .func  (.param .b32 func_retval0) crossweft_f1(
.param .b32 crossweft_f1_param_0
)
{
ret;
}
.visible .entry crossweft_a(
)
{
call.uni crossweft_f2, ();
}
.visible .entry crossweft_ab(
)
{
call.uni crossweft_f11, ();
}
";

    #[test]
    fn an_entry_has_what_it_calls_and_nothing_else() {
        let a = part(TEXT, "crossweft_a").unwrap();
        let without = |text: &str, begin: &str, end: &str| {
            let (before, rest) = text.split_once(begin).unwrap();
            let (_, after) = rest.split_once(end).unwrap();
            format!("{before}{end}{after}")
        };
        let expected = without(TEXT, ".func crossweft_f11", ".visible .func  (");
        let end = expected.find(".visible .entry crossweft_ab").unwrap();
        assert_eq!(a, expected[..end]);
        let ab = part(TEXT, "crossweft_ab").unwrap();
        assert!(ab.contains(".func crossweft_f11(") && !ab.contains(".func crossweft_f2("));
        assert!(!ab.contains("crossweft_a("));
        for name in ["crossweft_b", "crossweft_state", "crossweft_"] {
            assert_eq!(part(TEXT, name), None);
        }
        assert_eq!(part("", "crossweft_a"), None);
    }

    #[test]
    fn parts_of_all_modules_are_whole() {
        for module in crate::MODULES {
            let mut bytes = 0;
            for entry in module.entries {
                let text = module.part(entry).unwrap();
                assert_eq!(text.matches(".entry ").count(), 1, "{entry}");
                assert!(text.contains(&format!(".entry {entry}(")), "{entry}");
                // What is called is there.
                let declared: BTreeSet<&str> = begins(&text)
                    .filter_map(|at| names(&text[at..]).next())
                    .collect();
                for call in text.split("call.uni").skip(1) {
                    let called = names(call).next().unwrap();
                    assert!(declared.contains(called), "{entry} calls {called}");
                }
                bytes += text.len();
            }
            assert!(module.entries.len() == 1 || bytes > module.ptx.len() / 2);
        }
    }
}
