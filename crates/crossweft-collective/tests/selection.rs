//! Plans of the user's beside the built-in algorithms, tuning tables, and ranks that would choose differently.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use crossweft_collective::{
    Algorithm, Candidate, Collective, CollectiveError, CollectiveOptions, Communicator,
    CommunicatorOptions, DataType, DeviceKind, Explanation, Fingerprint, Place, ReduceOp, Refusal,
    Registry, RegistryError, Request, Selection, TableError, TuneOptions, TuningTable, Verdict,
    run_in_threads, tune,
};
use crossweft_hal::cuda::Cache;
use crossweft_plan::{InPlace, Plan};

const OPTIONS: CommunicatorOptions = CommunicatorOptions {
    timeout: Duration::from_secs(60),
};

fn request(place: Place) -> Request {
    Request {
        collective: Collective::AllReduce,
        world_size: 2,
        dtype: DataType::F32,
        op: ReduceOp::Sum,
        place,
        in_place: None,
        device: DeviceKind::Cpu,
        max_bytes: 1 << 20,
        most_blocks: u32::MAX,
        deterministic: false,
    }
}

/// The ring under another name: by the cost model faster than what 512 B take otherwise.
fn mine() -> Plan {
    let mut plan = Algorithm::Ring.plan(2, 1).unwrap();
    "mine".clone_into(&mut plan.name);
    plan
}

/// An environment of these variables alone.
fn environment(set: &[(&str, &Path)]) -> impl Fn(&str) -> Option<OsString> + use<> {
    let set: HashMap<String, OsString> = set
        .iter()
        .map(|(name, value)| ((*name).to_owned(), value.as_os_str().to_owned()))
        .collect();
    move |name| set.get(name).cloned()
}

/// An environment with that cache.
fn cached(folder: &Path) -> impl Fn(&str) -> Option<OsString> + use<> {
    environment(&[("CROSSWEFT_CACHE_DIR", folder)])
}

/// Writes a table of all-reduces of two ranks in private memory: by candidate, and by size with a time each.
fn write_table(
    folder: &Path,
    fingerprint: &Fingerprint,
    plans: &[Plan],
    rows: &[(u64, &[f64])],
) -> String {
    let candidates: Vec<String> = plans
        .iter()
        .map(|plan| {
            let (name, hash) = (&plan.name, plan.content_hash());
            format!(r#"{{"name": "{name}", "blocks": 1, "plan": "{hash}"}}"#)
        })
        .collect();
    let rows: Vec<String> = rows
        .iter()
        .map(|(bytes, us)| format!(r#"{{"bytes": {bytes}, "us": {us:?}}}"#))
        .collect();
    let fingerprint_json = serde_json::to_string(fingerprint).unwrap();
    let library = env!("CARGO_PKG_VERSION");
    let text = format!(
        r#"{{"format": "crossweft-tuning", "version": 1, "library": "{library}", "world_size": 2,
            "fingerprint": {fingerprint_json}, "measurements": [{{"collective": "all-reduce",
            "place": "private", "dtype": "f32", "op": "sum",
            "candidates": [{}], "rows": [{}]}}]}}"#,
        candidates.join(", "),
        rows.join(", ")
    );
    store(folder, fingerprint, &text);
    text
}

fn store(folder: &Path, fingerprint: &Fingerprint, text: &str) {
    let file = folder.join(TuningTable::file_name(fingerprint, 2));
    fs::write(&file, text).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
}

fn built_in() -> Vec<Plan> {
    let all = [
        Algorithm::OneShot,
        Algorithm::TwoShotStaged,
        Algorithm::Ring,
    ];
    all.map(|algorithm| algorithm.plan(2, 1).unwrap()).to_vec()
}

/// Two shots, the ring from 64 KiB to 128 KiB.
const ODD: [(u64, &[f64]); 4] = [
    (512, &[0.2, 0.4, 0.4]),
    (65_536, &[90.0, 10.0, 20.0]),
    (131_072, &[180.0, 30.0, 15.0]),
    (1 << 20, &[1000.0, 100.0, 200.0]),
];

fn choices(selection: &Selection, request: &Request) -> Vec<(String, u64)> {
    let selector = selection.select(request);
    let those = selector.choices().iter();
    those
        .map(|choice| (choice.algorithm.to_string(), choice.up_to))
        .collect()
}

fn named(those: &[(&str, u64)]) -> Vec<(String, u64)> {
    those
        .iter()
        .map(|(name, up_to)| ((*name).to_owned(), *up_to))
        .collect()
}

#[test]
fn a_plan_that_the_model_says_is_faster_is_chosen_where_it_is_and_right() {
    let place = request(Place::Private);
    let mut selection = Selection::shipped(Fingerprint::unknown(), 2);
    let shipped = named(&[("one-shot", 512), ("two-shot-staged", 1 << 20)]);
    assert_eq!(choices(&selection, &place), shipped);
    selection.registry_mut().register(mine(), "here").unwrap();
    let with = named(&[
        ("one-shot", 256),
        ("mine", 512),
        ("two-shot-staged", 1 << 20),
    ]);
    assert_eq!(choices(&selection, &place), with);
    // Another operation, in whole multiples only, from 300 B on.
    let mut picky = mine();
    "picky".clone_into(&mut picky.name);
    picky.equal_chunks = true;
    picky.message_bytes.0 = 300;
    picky.reduce_op = Some(ReduceOp::Max);
    let results = run_in_threads(2, OPTIONS, |communicator| {
        communicator.register(picky.clone(), "here")?;
        let options = CollectiveOptions::new(DataType::F32, ReduceOp::Max, 4096);
        let all_reduce = communicator.all_reduce(options)?;
        let mut taken = Vec::new();
        for count in [1, 64, 75, 80, 100, 128, 1000] {
            let bytes = count * 4;
            let value = |rank: u32, i: usize| (rank as f32 - 0.5) * (i + 1) as f32;
            let input: Vec<u8> = (0..count)
                .flat_map(|i| value(communicator.rank(), i).to_le_bytes())
                .collect();
            let mut output = vec![0; bytes];
            all_reduce.run(&input, &mut output)?;
            let expected: Vec<u8> = (0..count)
                .flat_map(|i| value(1, i).max(value(0, i)).to_le_bytes())
                .collect();
            assert_eq!(output, expected, "{count}");
            taken.push((
                bytes,
                all_reduce.explain(bytes as u64).algorithm.to_string(),
            ));
        }
        Ok(taken)
    })
    .unwrap();
    let expected = [
        (4, "one-shot"),
        (256, "one-shot"),
        // No multiple of 32, and then one.
        (300, "one-shot"),
        (320, "picky"),
        (400, "one-shot"),
        (512, "picky"),
        (4000, "two-shot-staged"),
    ];
    for taken in results {
        let taken: Vec<_> = taken
            .iter()
            .map(|(bytes, name)| (*bytes, &**name))
            .collect();
        assert_eq!(taken, expected);
    }
}

#[test]
fn every_refusal_has_its_reason() {
    let mut selection = Selection::shipped(Fingerprint::unknown(), 2);
    let mut add = |name: &str, change: &dyn Fn(&mut Plan)| {
        let mut plan = mine();
        change(&mut plan);
        name.clone_into(&mut plan.name);
        selection.registry_mut().register(plan, "here").unwrap();
    };
    add("max", &|plan| plan.reduce_op = Some(ReduceOp::Max));
    add("apart", &|plan| plan.in_place = InPlace::Forbidden);
    add("aliased", &|plan| plan.in_place = InPlace::Required);
    add("large", &|plan| plan.message_bytes = (4096, 8192));
    add("whole", &|plan| plan.equal_chunks = true);
    add("three", &|plan| *plan = Algorithm::Ring.plan(3, 1).unwrap());
    add("reach", &|plan| {
        *plan = Algorithm::TwoShot.plan(2, 1).unwrap()
    });
    add("gather", &|plan| {
        *plan = Algorithm::Staged
            .plan_of(Collective::AllGather, 2, 1)
            .unwrap();
    });
    let of = |request: &Request, bytes, name: &str| {
        let explanation = Explanation::new(request, bytes, &selection);
        let found = explanation.candidates.iter().find(|one| one.name == name);
        let found = found.unwrap();
        (found.verdict, found.reason.clone())
    };
    let private = request(Place::Private);
    for (name, words) in [
        ("max", "it computes max"),
        (
            "apart",
            "it does not work in place, and calls may be in place",
        ),
        (
            "aliased",
            "it only works in place, and calls may be out of place",
        ),
        ("large", "it is for messages of 4096 to 8192 B"),
        ("whole", "multiples of 32 B"),
        ("three", "it is for 3 ranks"),
        ("reach", "needs symmetric memory"),
        ("two-shot", "needs symmetric memory"),
        ("gather", "it computes all-gather"),
    ] {
        let (verdict, reason) = of(&private, 100, name);
        assert_eq!(verdict, Verdict::Refused, "{name}");
        assert!(reason.contains(words), "{name}: {reason}");
    }
    let known = Request {
        in_place: Some(true),
        ..private.clone()
    };
    assert_ne!(of(&known, 100, "aliased").0, Verdict::Refused);
    let known = Request {
        in_place: Some(false),
        ..private
    };
    assert_ne!(of(&known, 4096, "apart").0, Verdict::Refused);
    assert_ne!(
        of(&request(Place::Symmetric), 4096, "reach").0,
        Verdict::Refused
    );
    // What it takes is bounded by scratch memory, whatever is asked for.
    let huge = Request {
        max_bytes: 1 << 33,
        ..request(Place::Private)
    };
    let (verdict, reason) = of(&huge, 1 << 33, "max");
    assert_eq!((verdict, &*reason), (Verdict::Refused, "it computes max"));
    let (verdict, reason) = of(&huge, 1 << 33, "one-shot");
    assert_ne!(verdict, Verdict::Chosen, "{reason}");
}

#[test]
fn plans_that_cannot_be_chosen_are_not_registered() {
    let mut registry = Registry::new();
    let mut refused = |plan: Plan| registry.register(plan, "a file").unwrap_err();
    let mut broken = mine();
    broken.ranks[0].blocks[0].pop();
    let error = refused(broken);
    assert!(matches!(error, RegistryError::Refused { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.starts_with("a file: plan `mine` is refused by the checker: "),
        "{text}"
    );
    let mut test = mine();
    test.collective = Collective::Test;
    let error = refused(test);
    assert!(matches!(error, RegistryError::Collective { .. }), "{error}");
    let error = refused(Algorithm::Ring.plan(2, 1).unwrap());
    assert!(
        error
            .to_string()
            .contains("a built-in algorithm named `ring`"),
        "{error}"
    );

    registry.register(mine(), "one").unwrap();
    // Once more is nothing new.
    registry.register(mine(), "two").unwrap();
    assert_eq!(registry.plans().len(), 1);
    let mut other = mine();
    other.equal_chunks = true;
    let error = registry.register(other, "two").unwrap_err();
    assert!(
        error.to_string().contains("a plan of one named `mine`"),
        "{error}"
    );
}

#[test]
fn plans_come_from_files_and_folders() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("b.json"), mine().to_json()).unwrap();
    fs::write(at("notes.txt"), "no plan").unwrap();
    let mut other = mine();
    "other".clone_into(&mut other.name);
    other.equal_chunks = true;
    fs::write(at("a.json"), other.to_json()).unwrap();
    let plans = |path: &Path| {
        let registry = Registry::from_environment(environment(&[("CROSSWEFT_PLANS", path)]));
        let registry = registry.map_err(|error| error.to_string())?;
        let name = |plan: &std::sync::Arc<crossweft_collective::UserPlan>| plan.plan().name.clone();
        Ok::<_, String>(registry.plans().iter().map(name).collect::<Vec<_>>())
    };
    assert_eq!(plans(folder.path()).unwrap(), ["other", "mine"]);
    assert_eq!(plans(&at("b.json")).unwrap(), ["mine"]);
    let both = format!("{}:{}", at("b.json").display(), at("a.json").display());
    assert_eq!(plans(Path::new(&both)).unwrap(), ["mine", "other"]);
    assert_eq!(plans(Path::new("")).unwrap(), [""; 0]);
    assert!(plans(&at("none.json")).unwrap_err().contains("none.json: "));
    assert!(
        plans(&at("notes.txt"))
            .unwrap_err()
            .contains("not a readable plan")
    );
}

#[test]
fn what_was_measured_is_chosen_and_neighbours_are_one() {
    let folder = tempfile::tempdir().unwrap();
    let fingerprint = Fingerprint::unknown();
    write_table(folder.path(), &fingerprint, &built_in(), &ODD);
    let load = || Selection::decide(fingerprint.clone(), 2, cached(folder.path())).unwrap();
    let selection = load();
    assert!(
        selection.warnings().is_empty(),
        "{:?}",
        selection.warnings()
    );
    assert!(
        selection.source().starts_with("tuning table /"),
        "{}",
        selection.source()
    );
    let large = Request {
        max_bytes: 4 << 20,
        ..request(Place::Private)
    };
    let expected = [
        ("one-shot", 512),
        ("two-shot-staged", 65_536),
        ("ring", 131_072),
        // The last size that was measured, and by the shipped rule what is larger.
        ("two-shot-staged", 4 << 20),
    ];
    assert_eq!(choices(&selection, &large), named(&expected));
    // Whatever the type and operation, if they were not measured themselves.
    let other = Request {
        dtype: DataType::Bf16,
        op: ReduceOp::Max,
        ..large.clone()
    };
    assert_eq!(choices(&selection, &other), named(&expected));
    // Not in memory of another kind.
    let symmetric = choices(&selection, &request(Place::Symmetric));
    assert_eq!(
        symmetric,
        named(&[("one-shot", 512), ("two-shot", 1 << 20)])
    );
    // What is asked for may end anywhere.
    for max_bytes in [0, 8, 512, 513, 100_000] {
        let small = Request {
            max_bytes,
            ..large.clone()
        };
        assert_eq!(choices(&selection, &small).last().unwrap().1, max_bytes);
    }
    let explanation = Explanation::new(&large, 100_000, &selection);
    assert_eq!(explanation.measured_bytes, Some(131_072));
    let chosen = explanation.chosen().unwrap();
    assert_eq!((&*chosen.name, chosen.measured_us), ("ring", Some(15.0)));
    assert!(
        chosen
            .reason
            .starts_with("measured: 15.00 us at 131072 B, two-shot-staged 30")
    );
    let slower = explanation
        .candidates
        .iter()
        .find(|one| one.name == "one-shot")
        .unwrap();
    assert_eq!(slower.verdict, Verdict::NotChosen);
    assert!(
        slower.reason.contains("12.00 times as long as ring"),
        "{}",
        slower.reason
    );

    // As fast as each other within a few in a hundred: the shipped rule's stays.
    let even: [(u64, &[f64]); 2] = [
        (512, &[0.40, 0.39, 0.40]),
        (1 << 20, &[900.0, 101.0, 100.0]),
    ];
    write_table(folder.path(), &fingerprint, &built_in(), &even);
    let shipped = named(&[("one-shot", 512), ("two-shot-staged", 1 << 20)]);
    assert_eq!(choices(&load(), &request(Place::Private)), shipped);
    // Times of a plan that has changed are not believed.
    let mut changed = built_in();
    changed[2].equal_chunks = true;
    write_table(folder.path(), &fingerprint, &changed, &ODD);
    let selection = load();
    assert!(selection.warnings()[0].contains("all-reduce ring changed since it was measured"));
    let without = named(&[("one-shot", 512), ("two-shot-staged", 1 << 20)]);
    assert_eq!(choices(&selection, &request(Place::Private)), without);
    // A plan of the user's that is there, and one that is not.
    let plans = [built_in(), vec![mine()]].concat();
    let rows: [(u64, &[f64]); 1] = [(1 << 20, &[9.0, 9.0, 9.0, 1.0])];
    write_table(folder.path(), &fingerprint, &plans[..], &rows);
    let selection = load();
    assert!(selection.warnings().is_empty());
    assert_eq!(
        choices(&selection, &request(Place::Private)),
        named(&[("two-shot-staged", 1 << 20)])
    );
    let file = folder.path().join("mine.plan");
    fs::write(&file, mine().to_json()).unwrap();
    let both = [
        ("CROSSWEFT_CACHE_DIR", folder.path()),
        ("CROSSWEFT_PLANS", &file),
    ];
    let selection = Selection::decide(fingerprint.clone(), 2, environment(&both)).unwrap();
    assert_eq!(
        choices(&selection, &request(Place::Private)),
        named(&[("mine", 1 << 20)])
    );
    // Turned off.
    let off = [
        ("CROSSWEFT_CACHE_DIR", folder.path()),
        ("CROSSWEFT_TUNING", Path::new("off")),
    ];
    let selection = Selection::decide(fingerprint, 2, environment(&off)).unwrap();
    assert!(selection.table().is_none());
    assert!(selection.source().contains("CROSSWEFT_TUNING=off"));
    assert_eq!(selection.warnings(), &[] as &[String]);
    // Or meant for something else.
    let file = [("CROSSWEFT_TUNING", Path::new("table.json"))];
    let selection = Selection::decide(Fingerprint::unknown(), 2, environment(&file)).unwrap();
    assert_eq!(
        selection.warnings(),
        [
            "CROSSWEFT_TUNING is \"table.json\", which says nothing: it is `off` or `on`; the tables are in CROSSWEFT_CACHE_DIR"
        ]
    );
}

/// splitmix64: the same numbers on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

#[test]
fn a_size_takes_the_same_however_large_the_messages_are_that_it_was_prepared_for() {
    let folder = tempfile::tempdir().unwrap();
    let mut random = Random(7);
    let mut picky = mine();
    "picky".clone_into(&mut picky.name);
    picky.equal_chunks = true;
    picky.message_bytes = (300, 100_000);
    for round in 0..60 {
        // Times of any order, sizes of any distance, some not measured.
        let mut sizes: Vec<u64> = (0..random.below(8))
            .map(|_| random.below(1 << 21))
            .collect();
        sizes.extend((round % 4 == 0).then_some(0));
        sizes.sort_unstable();
        sizes.dedup();
        let times: Vec<Vec<f64>> = sizes
            .iter()
            .map(|_| (0..3).map(|_| 1.0 + random.below(9) as f64).collect())
            .collect();
        let rows: Vec<(u64, &[f64])> = sizes
            .iter()
            .copied()
            .zip(times.iter().map(|t| &**t))
            .collect();
        let text = write_table(folder.path(), &Fingerprint::unknown(), &built_in(), &rows);
        let table = TuningTable::from_json(text.as_bytes()).unwrap();
        let mut selection = Selection::of_table(table);
        if round % 3 != 0 {
            selection.registry_mut().register(mine(), "here").unwrap();
        }
        if round % 3 == 2 {
            selection
                .registry_mut()
                .register(picky.clone(), "here")
                .unwrap();
        }
        let places = [Place::Private, Place::Symmetric, Place::OneSymmetric];
        let of = |max_bytes| Request {
            max_bytes,
            in_place: Some(false),
            device: [DeviceKind::Cpu, DeviceKind::Cuda][round / 2 % 2],
            ..request(places[round % 3])
        };
        let name = |request: &Request, bytes| {
            let selector = selection.select(request);
            let choice = &selector.all()[selector.select(bytes)];
            assert!(bytes <= choice.up_to);
            (choice.algorithm.to_string(), choice.blocks)
        };
        let whole = of(1 << 30);
        for _ in 0..20 {
            let [low, high] = [random.below(23), random.below(23)];
            let bytes = random.below(1 << low);
            let max_bytes = bytes + random.below(1 << high);
            let small = of(max_bytes);
            let selector = selection.select(&small);
            let choices = selector.choices();
            assert!(choices.is_sorted_by(|a, b| a.up_to < b.up_to), "{selector}");
            assert_eq!(choices.last().unwrap().up_to, max_bytes);
            assert!(selector.all().iter().all(|c| c.piece <= c.up_to));
            let expected = name(&whole, bytes);
            assert_eq!(
                name(&small, bytes),
                expected,
                "{bytes} of {max_bytes}: {text}"
            );
            let explained = Explanation::new(&of(bytes), bytes, &selection);
            assert_eq!(explained.chosen, expected.0);
        }
    }
}

#[test]
fn a_table_that_is_not_to_be_used_is_named_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let fingerprint = Fingerprint::unknown();
    let good = write_table(folder.path(), &fingerprint, &built_in(), &ODD);
    let table = TuningTable::from_json(good.as_bytes()).unwrap();
    assert_eq!(
        TuningTable::from_json(table.to_json().as_bytes()).unwrap(),
        table
    );
    assert_eq!(
        table
            .to_json()
            .lines()
            .filter(|line| line.contains("\"bytes\""))
            .count(),
        4
    );
    let library = format!("\"library\": \"{}\"", env!("CARGO_PKG_VERSION"));
    for (from, to, words) in [
        (
            &*library,
            "\"library\": \"0.0.1\"",
            "it was measured by version 0.0.1",
        ),
        ("\"version\": 1", "\"version\": 2", "its format is not"),
        ("crossweft-tuning", "something", "its format is not"),
        (
            "\"world_size\": 2",
            "\"world_size\": 4",
            "on other hardware",
        ),
        (
            "\"fingerprint\": {}",
            "\"fingerprint\": {\"a VAX\": 2}",
            "on other hardware",
        ),
        ("\"bytes\": 65536", "\"bytes\": 5", "sizes do not ascend"),
        (
            "[0.2, 0.4, 0.4]",
            "[0.2, 0.4]",
            "2 times of 3 candidates at 512 B",
        ),
        ("[0.2, 0.4, 0.4]", "[0.2, -0.4, 0.4]", "is no time"),
        ("[0.2, 0.4, 0.4]", "[0.2, 1e999, 0.4]", "not a tuning table"),
        ("all-reduce", "all-redoce", "there is no all-redoce"),
        ("\"rows\"", "\"raws\"", "unknown field `raws`"),
        ("\"format\"", "", "not a tuning table"),
    ] {
        assert!(good.contains(from), "{from}");
        store(folder.path(), &fingerprint, &good.replacen(from, to, 1));
        let decided = Selection::decide(fingerprint.clone(), 2, cached(folder.path()));
        let selection = decided.unwrap();
        assert!(selection.table().is_none());
        let warning = &selection.warnings()[0];
        assert!(warning.contains(words), "{warning}");
        assert!(warning.contains("run `crossweft tune` again"), "{warning}");
        assert!(selection.source().contains(words), "{}", selection.source());
    }
    for length in 0..good.len() - 1 {
        assert!(matches!(
            TuningTable::from_json(&good.as_bytes()[..length]),
            Err(TableError::Format { .. })
        ));
    }
}

/// What every rank says of choosing by what `environment` says of it.
fn disagree<E: Fn(&str) -> Option<OsString>>(environment: impl Fn(u32) -> E + Sync) -> Vec<String> {
    run_in_threads(2, OPTIONS, |communicator| {
        let fingerprint = communicator.selection().fingerprint().clone();
        let of_rank = environment(communicator.rank());
        let selection = Selection::decide(fingerprint, 2, of_rank).unwrap();
        let error = communicator.select_by(selection).unwrap_err();
        // Nothing has changed, and the job goes on.
        let options = CollectiveOptions::new(DataType::F32, ReduceOp::Sum, 64);
        communicator
            .all_reduce(options)?
            .run_in_place(&mut [0; 64])?;
        Ok(error.to_string())
    })
    .unwrap()
}

fn fingerprint_of_two() -> Fingerprint {
    let of = |communicator: &Communicator| Ok(communicator.selection().fingerprint().clone());
    run_in_threads(2, OPTIONS, of).unwrap().swap_remove(0)
}

#[test]
fn ranks_with_other_tables_or_plans_are_named_with_the_entry() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let fingerprint = fingerprint_of_two();
    let even = [ODD[0], ODD[1], (131_072, &[180.0, 15.0, 30.0][..]), ODD[3]];
    write_table(one.path(), &fingerprint, &built_in(), &even);
    write_table(other.path(), &fingerprint, &built_in(), &ODD);
    let errors = disagree(|rank| cached([one.path(), other.path()][rank as usize]));
    let file = TuningTable::file_name(&fingerprint, 2);
    for error in errors {
        let (one, other) = (one.path().join(&file), other.path().join(&file));
        let expected = format!(
            "all-reduce, private buffers: rank 1 would take ring for 65537..131072 B (tuning table {}), \
             rank 0 two-shot-staged (tuning table {})",
            other.display(),
            one.display()
        );
        assert!(error.starts_with(&expected), "{error}");
    }
    // A rank without a table, because of its environment: what it would take is known all the same.
    let errors = disagree(|rank| {
        let off = [("CROSSWEFT_TUNING", Path::new("OFF"))];
        let cached = [("CROSSWEFT_CACHE_DIR", other.path())];
        environment(if rank == 1 { &off } else { &cached })
    });
    for error in errors {
        let words = "rank 1 would take two-shot-staged for 65537..131072 B (the shipped rule \
                     (CROSSWEFT_TUNING=off)), rank 0 ring (tuning table";
        assert!(error.contains(words), "{error}");
    }
    // Other times, but the same choices: nobody minds.
    let third = tempfile::tempdir().unwrap();
    let faster = [ODD[0], ODD[1], (131_072, &[80.0, 30.0, 14.0][..]), ODD[3]];
    write_table(third.path(), &fingerprint, &built_in(), &faster);
    run_in_threads(2, OPTIONS, |communicator| {
        let folder = [other.path(), third.path()][communicator.rank() as usize];
        let fingerprint = communicator.selection().fingerprint().clone();
        communicator.select_by(Selection::decide(fingerprint, 2, cached(folder)).unwrap())
    })
    .unwrap();

    let plan = one.path().join("mine.plan");
    fs::write(&plan, mine().to_json()).unwrap();
    for has in [0, 1] {
        let errors = disagree(|rank| {
            let set = [("CROSSWEFT_PLANS", &*plan)];
            environment(if rank == has { &set } else { &[] })
        });
        for error in errors {
            let has_not = 1 - has;
            let expected = format!(
                "rank {has} has registered plan `mine` of {}, rank {has_not} has not",
                plan.display()
            );
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}

#[test]
fn a_plan_that_one_rank_cannot_register_is_registered_nowhere() {
    let errors = run_in_threads(2, OPTIONS, |communicator| {
        let mut plan = mine();
        if communicator.rank() == 1 {
            plan.ranks[0].blocks[0].pop();
        }
        let error = communicator.register(plan, "here").unwrap_err();
        assert!(communicator.selection().registry().plans().is_empty());
        Ok(error)
    })
    .unwrap();
    assert!(
        matches!(errors[1], CollectiveError::Registry(_)),
        "{}",
        errors[1]
    );
    assert!(
        errors[0]
            .to_string()
            .contains("rank 1 failed: here: plan `mine`"),
        "{}",
        errors[0]
    );
}

#[test]
fn tuning_measures_every_candidate_once_and_a_later_start_none() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let of = |collective, place| TuneOptions {
        collective,
        dtype: DataType::F32,
        op: ReduceOp::Sum,
        place,
        max_bytes: 20 << 10,
        budget: Duration::from_millis(50),
    };
    let options = [
        of(Collective::AllReduce, Place::Private),
        of(Collective::AllReduce, Place::Symmetric),
        of(Collective::AllGather, Place::Private),
    ];
    let tables = run_in_threads(2, OPTIONS, |communicator| {
        communicator.register(mine(), "here")?;
        let mut sizes = Vec::new();
        let tuned = tune(communicator, &options, &cache, |progress| {
            sizes.push((progress.index, progress.bytes));
        })?;
        assert!(sizes.len() >= 3 * 13, "{sizes:?}");
        assert_eq!(tuned.path.is_some(), communicator.rank() == 0);
        let source = communicator.selection().source().to_owned();
        assert!(source.contains("tuning table"), "{source}");
        // What it chooses by now is right, too.
        let prepare = CollectiveOptions::new(DataType::F32, ReduceOp::Sum, 20 << 10);
        let all_reduce = communicator.all_reduce(prepare)?;
        let value = (communicator.rank() as f32 + 1.0).to_le_bytes();
        for count in [1, 100, 5000] {
            let mut data = value.repeat(count);
            all_reduce.run_in_place(&mut data)?;
            assert_eq!(data, 3.0_f32.to_le_bytes().repeat(count));
        }
        Ok(tuned.table)
    })
    .unwrap();
    assert_eq!(tables[0], tables[1]);
    let table = &tables[0];
    let of_private = &table.measurements()[0];
    let names: Vec<&str> = of_private.candidates.iter().map(|one| &*one.name).collect();
    assert_eq!(names, ["one-shot", "two-shot-staged", "ring", "mine"]);
    let names = table.measurements()[1]
        .candidates
        .iter()
        .map(|one| &*one.name);
    assert_eq!(
        names.collect::<Vec<_>>(),
        ["one-shot", "two-shot", "two-shot-staged", "ring", "mine"]
    );
    for measurements in table.measurements() {
        let sizes: Vec<u64> = measurements.rows.iter().map(|row| row.bytes).collect();
        assert_eq!((sizes[0], *sizes.last().unwrap()), (8, 20 << 10));
        assert!(sizes.contains(&(16 << 10)), "{sizes:?}");
        assert!(measurements.candidates.len() >= 2);
        // All are measured to begin with. How fast they are, and so which of them fall behind, is this machine's affair
        // of the moment, but somebody is best at each size.
        let mut first = measurements.rows[..3].iter();
        assert!(first.all(|row| row.us.iter().all(Option::is_some)));
        for row in &measurements.rows {
            assert!(row.us.iter().any(Option::is_some), "{row:?}");
            assert!(row.us.iter().flatten().all(|us| *us > 0.0), "{row:?}");
        }
    }
    // A later start reads it.
    let fingerprint = fingerprint_of_two();
    let later = Selection::decide(fingerprint, 2, cached(folder.path())).unwrap();
    assert!(later.warnings().is_empty(), "{:?}", later.warnings());
    let loaded = later.table().unwrap();
    assert_eq!(loaded.measurements().len(), 3);
    assert_eq!(loaded.measurements()[0].rows.len(), of_private.rows.len());
    // And the file that writers lock.
    let files = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 2);
}

#[test]
fn sums_in_rank_order_leave_out_what_has_another_order() {
    let folder = tempfile::tempdir().unwrap();
    let fingerprint = fingerprint_of_two();
    let times: [(u64, &[f64]); 2] = [(512, &[0.2, 0.4, 0.3]), (1 << 20, &[500.0, 200.0, 100.0])];
    write_table(folder.path(), &fingerprint, &built_in(), &times);
    let mut selection = Selection::decide(fingerprint.clone(), 2, cached(folder.path())).unwrap();
    selection.registry_mut().register(mine(), "here").unwrap();
    let free = request(Place::Private);
    let fixed = Request {
        deterministic: true,
        ..free.clone()
    };
    let chosen = |request: &Request| selection.select(request).to_string();
    assert!(chosen(&free).contains("ring"), "{}", chosen(&free));
    assert!(!chosen(&fixed).contains("ring"), "{}", chosen(&fixed));
    assert!(chosen(&fixed).contains("one-shot"), "{}", chosen(&fixed));
    let mine = selection.registry().plans()[0].clone();
    for (candidate, is_refused) in [
        (Candidate::from(Algorithm::Ring), true),
        (Candidate::Plan(mine), true),
        (Algorithm::OneShot.into(), false),
        (Algorithm::TwoShotStaged.into(), false),
    ] {
        let refusal = |request: &Request| candidate.refusal(request);
        assert_eq!(
            refusal(&fixed) == Some(Refusal::NotInRankOrder),
            is_refused,
            "{candidate}"
        );
        // The order of these makes no difference.
        for same in [
            Request {
                op: ReduceOp::Max,
                ..fixed.clone()
            },
            Request {
                dtype: DataType::I32,
                ..fixed.clone()
            },
            free.clone(),
        ] {
            assert_ne!(refusal(&same), Some(Refusal::NotInRankOrder), "{candidate}");
        }
    }
    // By the environment, for all of a communicator.
    let variable = |name: &str| (name == "CROSSWEFT_DETERMINISTIC").then(|| "1".into());
    let set = Selection::decide(fingerprint, 2, variable).unwrap();
    assert!(set.is_deterministic() && !selection.is_deterministic());
    let asked = |value: &&str| {
        let variable = |name: &str| (name == "CROSSWEFT_DETERMINISTIC").then(|| (*value).into());
        let found = Selection::decide(fingerprint_of_two(), 2, variable).unwrap();
        found.is_deterministic()
    };
    assert!(["1", "true", "yes", "on"].iter().all(asked));
    assert!(!["", "0", "OFF", "no", "false"].iter().any(asked));
    let errors = run_in_threads(2, OPTIONS, |communicator| {
        let options = CollectiveOptions::new(DataType::F32, ReduceOp::Sum, 64);
        let all_reduce = communicator.all_reduce(options.clone().algorithm(Algorithm::Ring));
        assert!(all_reduce.is_ok());
        communicator.select_by(set.clone())?;
        let ring = communicator.all_reduce(options.algorithm(Algorithm::Ring));
        let refused = ring.unwrap_err().to_string();
        // Ranks that differ are told so.
        let mine = match communicator.rank() {
            0 => set.clone(),
            _ => Selection::shipped(fingerprint_of_two(), 2),
        };
        let differ = communicator.select_by(mine).unwrap_err().to_string();
        Ok([refused, differ])
    })
    .unwrap();
    for [refused, differ] in errors {
        assert!(
            refused.contains("ring: sums must be in rank order"),
            "{refused}"
        );
        assert!(
            differ.contains("rank 1 is not to sum in rank order, rank 0 is;"),
            "{differ}"
        );
    }
}

/// Whatever the algorithm and the size: the bits of a sum in rank order, rounded once.
#[test]
fn sums_in_rank_order_are_the_same_bits_by_every_algorithm() {
    const RANKS: u32 = 3;
    // Values whose sum depends on the order, and on how often it is rounded.
    let value = |rank: u32, index: usize| {
        let bits = (index as u32 * RANKS + rank).wrapping_mul(2_654_435_761);
        (f64::from(bits) / 2_f64.powi(31) - 1.0) as f32 * 10_f32.powi((bits % 7) as i32 - 3)
    };
    let expected =
        |index: usize| (1..RANKS).fold(value(0, index), |sum, rank| sum + value(rank, index));
    let reduce_all = Collective::AllReduce;
    run_in_threads(RANKS, OPTIONS, |communicator| {
        for algorithm in Algorithm::of(reduce_all).iter().copied() {
            let candidate = Candidate::from(algorithm);
            let asked = Request {
                world_size: RANKS,
                deterministic: true,
                ..request(Place::OneSymmetric)
            };
            if candidate.refusal(&asked) == Some(Refusal::NotInRankOrder) {
                continue;
            }
            for count in [1, 5, 1000, 70_001] {
                let bytes = count as u64 * 4;
                let memory = communicator.allocate(bytes)?;
                let options = CollectiveOptions::new(DataType::F32, ReduceOp::Sum, bytes)
                    .symmetric(&memory, &memory)
                    .algorithm(algorithm)
                    .deterministic();
                let call = communicator.all_reduce(options)?;
                let mine =
                    (0..count).flat_map(|index| value(communicator.rank(), index).to_le_bytes());
                memory.write(0, &mine.collect::<Vec<u8>>())?;
                call.run_symmetric(0, 0, bytes)?;
                let mut result = vec![0; bytes as usize];
                memory.read(0, &mut result)?;
                let expected: Vec<u8> = (0..count)
                    .flat_map(|index| expected(index).to_le_bytes())
                    .collect();
                assert!(result == expected, "{algorithm}, {count} elements");
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_table_that_cannot_be_written_is_an_error_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let options = [TuneOptions {
        collective: Collective::AllReduce,
        dtype: DataType::F32,
        op: ReduceOp::Sum,
        place: Place::Private,
        max_bytes: 8,
        budget: Duration::ZERO,
    }];
    let errors = run_in_threads(2, OPTIONS, |communicator| {
        let tuned = tune(
            communicator,
            &options,
            &Cache::at(&file.join("below")),
            |_| (),
        );
        Ok(tuned.unwrap_err().to_string())
    })
    .unwrap();
    assert!(
        errors[0].contains("cannot be written into"),
        "{}",
        errors[0]
    );
    assert!(errors[1].contains("rank 0 failed"), "{}", errors[1]);
}

/// The budget says how many calls are made.
#[test]
fn ranks_that_tune_otherwise_hear_of_it_before_anything_is_measured() {
    let errors = run_in_threads(2, OPTIONS, |communicator| {
        let options = [TuneOptions {
            collective: Collective::AllReduce,
            dtype: DataType::F32,
            op: ReduceOp::Sum,
            place: Place::Private,
            max_bytes: 8,
            budget: Duration::from_secs(1 + u64::from(communicator.rank())),
        }];
        let mut begun = 0;
        let cache = Cache::at(Path::new("/nowhere"));
        let tuned = tune(communicator, &options, &cache, |_| begun += 1);
        assert_eq!(begun, 0);
        communicator.barrier()?;
        Ok(tuned.unwrap_err().to_string())
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("while tuning"), "{error}");
        assert!(
            error.contains("in 1s") && error.contains("in 2s"),
            "{error}"
        );
    }
}

#[test]
fn tuning_that_has_nothing_to_measure_leaves_tables_alone() {
    let folder = tempfile::tempdir().unwrap();
    let fingerprint = fingerprint_of_two();
    write_table(folder.path(), &fingerprint, &built_in(), &ODD);
    for (max_bytes, reason) in [
        (0, "nothing to tune"),
        (3, "nothing to tune"),
        (u64::MAX - 7, "larger than memory can be"),
        (1 << 63, "larger than memory can be"),
    ] {
        let options = [8, max_bytes].map(|max_bytes| TuneOptions {
            collective: Collective::AllReduce,
            dtype: DataType::F32,
            op: ReduceOp::Sum,
            place: Place::Private,
            max_bytes,
            budget: Duration::ZERO,
        });
        let errors = run_in_threads(2, OPTIONS, |communicator| {
            let mut begun = 0;
            let cache = Cache::at(folder.path());
            let tuned = tune(communicator, &options, &cache, |_| begun += 1);
            assert_eq!(begun, 0);
            Ok(tuned.unwrap_err().to_string())
        });
        for error in errors.unwrap() {
            assert!(error.contains(reason), "{error}");
        }
    }
    let later = Selection::decide(fingerprint, 2, cached(folder.path())).unwrap();
    let rows = later.table().unwrap().measurements().iter();
    assert_eq!(rows.map(|m| m.rows.len()).collect::<Vec<_>>(), [4]);
}

#[test]
fn tuning_keeps_what_a_table_holds_that_was_turned_off() {
    let folder = tempfile::tempdir().unwrap();
    let fingerprint = fingerprint_of_two();
    write_table(folder.path(), &fingerprint, &built_in(), &ODD);
    let options = [TuneOptions {
        collective: Collective::AllGather,
        dtype: DataType::F32,
        op: ReduceOp::Sum,
        place: Place::Private,
        max_bytes: 8,
        budget: Duration::ZERO,
    }];
    run_in_threads(2, OPTIONS, |communicator| {
        // It chooses by the shipped rule.
        communicator.select_by(Selection::shipped(fingerprint_of_two(), 2))?;
        tune(communicator, &options, &Cache::at(folder.path()), |_| ())
    })
    .unwrap();
    let later = Selection::decide(fingerprint, 2, cached(folder.path())).unwrap();
    let table = later.table().unwrap();
    let measured = table.measurements().iter();
    let measured: Vec<_> = measured.map(|m| (&*m.collective, m.rows.len())).collect();
    assert_eq!(measured, [("all-reduce", 4), ("all-gather", 1)]);
}

#[test]
fn what_was_prepared_is_explained_by_what_it_was_chosen_by() {
    let folder = tempfile::tempdir().unwrap();
    write_table(folder.path(), &fingerprint_of_two(), &built_in(), &ODD);
    run_in_threads(2, OPTIONS, |communicator| {
        let fingerprint = fingerprint_of_two();
        communicator.select_by(Selection::shipped(fingerprint.clone(), 2))?;
        let options = CollectiveOptions::new(DataType::F32, ReduceOp::Sum, 1 << 20);
        let shipped = communicator.all_reduce(options.clone())?;
        let table = Selection::decide(fingerprint, 2, cached(folder.path())).unwrap();
        communicator.select_by(table)?;
        let explained = |options| {
            let explained = communicator.all_reduce(options)?.explain_all(128 << 10);
            Ok::<_, CollectiveError>((explained.chosen, explained.source))
        };
        let before = shipped.explain_all(128 << 10);
        assert_eq!(before.chosen, "two-shot-staged");
        assert_eq!(before.source, "the shipped rule");
        assert_eq!(before.measured_bytes, None);
        let (chosen, source) = explained(options.clone())?;
        assert_eq!(chosen, "ring");
        assert!(source.starts_with("tuning table "), "{source}");
        let (chosen, source) = explained(options.algorithm(Algorithm::OneShot))?;
        assert_eq!((&*chosen, &*source), ("one-shot", "the caller"));
        Ok(())
    })
    .unwrap();
}
