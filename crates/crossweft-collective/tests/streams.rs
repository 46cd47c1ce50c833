//! Launches on worker streams: in order, not on the caller's thread, errors at the end.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use crossweft_collective::{Algorithm, CommunicatorOptions, DataType, ReduceOp, run_in_threads};
use crossweft_executor::{Options, Prepared, RawBuffers, Stream};

fn buffers(input: &[u8], output: &mut [u8]) -> RawBuffers {
    RawBuffers {
        input: input.as_ptr().expose_provenance() as u64,
        output: output.as_mut_ptr().expose_provenance() as u64,
        input_offset: 0,
        output_offset: 0,
        bytes: input.len() as u64,
    }
}

#[test]
fn launches_on_a_worker_follow_one_another() {
    let limit = Duration::from_secs(30);
    run_in_threads(2, CommunicatorOptions { timeout: limit }, |communicator| {
        let plan = Algorithm::TwoShotStaged.plan(2, 3)?;
        let options = Options::new(DataType::U32, ReduceOp::Sum, 400);
        let deadline = Instant::now() + limit;
        let prepared = Prepared::prepare(communicator.endpoint(), &plan, options, deadline)?;
        let stream = Stream::worker()?;
        // The output of each launch is the input of the next: the order shows in the result.
        let mut data = (communicator.rank() + 1).to_le_bytes().repeat(100);
        let place = buffers(&data.clone(), &mut data);
        let place = RawBuffers {
            input: place.output,
            ..place
        };
        for _ in 0..20 {
            // SAFETY: `data` outlives the launches and is not touched until they have ended.
            unsafe { prepared.launch_on(&stream, &place, limit) }.unwrap();
        }
        stream.synchronize().unwrap();
        // 1 + 2, and then doubled 19 times.
        assert_eq!(data, (3_u32 << 19).to_le_bytes().repeat(100));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_launch_that_fails_on_a_worker_is_reported_when_it_is_waited_for() {
    let limit = Duration::from_secs(30);
    run_in_threads(2, CommunicatorOptions { timeout: limit }, |communicator| {
        let plan = Algorithm::OneShot.plan(2, 1)?;
        let options = Options::new(DataType::U32, ReduceOp::Sum, 400);
        let deadline = Instant::now() + limit;
        let prepared = Prepared::prepare(communicator.endpoint(), &plan, options, deadline)?;
        let stream = Stream::worker()?;
        let input = vec![0; 400];
        let mut output = vec![0; 400];
        let place = buffers(&input, &mut output);
        if communicator.rank() == 0 {
            // Rank 1 never launches.
            let short = Duration::from_millis(200);
            // SAFETY: the buffers outlive the launch.
            unsafe { prepared.launch_on(&stream, &place, short) }.unwrap();
            let error = stream.synchronize().unwrap_err().to_string();
            assert!(error.contains("a packet from rank 1"), "{error}");
            // SAFETY: as above.
            let later = unsafe { prepared.launch_on(&stream, &place, limit) };
            assert!(later.is_err(), "a failed stream launches nothing more");
        }
        // Both stay until then: nobody has left or died, it is the deadline that speaks.
        communicator.barrier()
    })
    .unwrap();
}
