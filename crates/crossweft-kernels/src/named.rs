//! Kernels in C++ namespaces, as programs that measure look for them in what profilers tell: `crossweft::moe::dispatch_bf16`
//! for `crossweft_moe_dispatch_bf16`.

use std::sync::LazyLock;

use crate::{MODULES, Module};

/// Entry points that begin with this are named; what follows, up to `dispatch` or `combine`, are namespaces.
const PREFIX: &str = "crossweft_moe_";

/// The texts of modules that have such entry points, with their names.
static TEXTS: LazyLock<Vec<(&'static Module, String)>> = LazyLock::new(|| {
    let all = MODULES.iter();
    let have = all.filter(|m| m.entries.iter().any(|entry| entry.starts_with(PREFIX)));
    have.map(|module| {
        let names = module.entries.iter();
        let text = names.fold(module.ptx.to_owned(), |text, entry| {
            text.replace(entry, &mangled(entry))
        });
        (module, text)
    })
    .collect()
});

/// The text of a module with the names that [`mangled`] gives; the module's own if none of its entry points is named. The
/// same address each time, by which a loaded module is found again.
#[must_use]
pub fn named(module: &Module) -> &'static str {
    let found = TEXTS
        .iter()
        .find(|(of, _)| (of.name, of.sm) == (module.name, module.sm));
    found.map_or(module.ptx, |(_, text)| text)
}

/// The name of an entry point in [`named`] text, by the rules of the Itanium C++ ABI.
#[must_use]
pub fn mangled(entry: &str) -> String {
    let Some(rest) = entry.strip_prefix(PREFIX) else {
        return entry.to_owned();
    };
    let function = ["dispatch", "combine"]
        .into_iter()
        .find_map(|word| rest.find(word));
    let (spaces, function) = rest.split_at(function.unwrap_or(0));
    let spaces = spaces.split('_').filter(|space| !space.is_empty());
    let parts = ["crossweft", "moe"].into_iter().chain(spaces);
    let nested: String = parts
        .chain([function])
        .map(|part| format!("{}{part}", part.len()))
        .collect();
    format!("_ZN{nested}Ev")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_c_plus_plus_s() {
        let name = mangled("crossweft_moe_dispatch_bf16");
        assert_eq!(name, "_ZN9crossweft3moe13dispatch_bf16Ev");
        let name = mangled("crossweft_moe_rows_combine_f32");
        assert_eq!(name, "_ZN9crossweft3moe4rows11combine_f32Ev");
        assert_eq!(mangled("crossweft_plan_f32"), "crossweft_plan_f32");
    }

    #[test]
    fn texts_have_all_their_names_and_no_other() {
        let mut named_ones = 0;
        for module in MODULES {
            let text = named(module);
            for entry in module.entries {
                let name = mangled(entry);
                assert!(text.contains(&format!(".entry {name}(")), "{name}");
            }
            if text != module.ptx {
                named_ones += 1;
                assert!(!text.contains(PREFIX), "{}", module.name);
            }
            assert!(std::ptr::eq(named(module), text));
        }
        assert!(named_ones > 0);
    }
}
