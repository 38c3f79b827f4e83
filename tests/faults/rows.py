"""The faults that are promised to be survived, and the tests that show it."""

from dataclasses import dataclass

JOBS = "tests/faults/test_jobs.py::"
STOPPING = "tests/faults/test_stopping.py::"
AGREEMENT = "tests/faults/test_agreement.py::"
CHECKPOINTS = "tests/faults/test_checkpoints.py::"
HOSTS = "tests/faults/test_hosts.py::"
ENDS = JOBS + "test_a_rank_that_fails_or_hangs_is_noticed_and_the_job_goes_on"
QUICK = JOBS + "test_a_stop_and_three_faults_leave_no_trace_in_the_weights"
NAMED = JOBS + "test_a_rank_that_hangs_is_named_with_its_step"
BEARS = JOBS + "test_what_one_rank_can_bear_needs_no_restart"
BACK = HOSTS + "test_a_host_that_comes_back_joins_the_next_attempt"
WORKERS = "tests/unit/data/test_loader_workers.py::"
NAMESPACES = "tests/unit/launch/test_rendezvous_namespaces.py::"
RECOVERY = "tests/unit/engine/test_recovery.py::"
SAVING = "tests/unit/engine/test_trainer_saving.py::"
KILLS = "tests/unit/engine/test_checkpoint_kills.py::"
WATCH = "tests/unit/launch/test_watchdog.py::"
SUPERVISION = "tests/unit/launch/test_supervisor.py::"
OUTLETS = "tests/unit/common/test_writers_failures.py::"


@dataclass(frozen=True)
class Row:
    """tests: node ids; without [...] every case counts.  Empty: `without` says why."""

    number: int
    fault: str
    promise: str
    tests: tuple[str, ...]
    without: str = ""


ROWS = (
    Row(1, "SIGKILL of one rank", "the others are stopped, the job goes on from its newest "
        "checkpoint and ends with the same weights, bit for bit",
        (ENDS + "[kill]", JOBS + "test_a_rank_that_dies_at_rank_0s_side_is_as_good_as_any",
         JOBS + "test_a_job_that_is_killed_again_and_again_ends_with_the_same_weights",
         QUICK)),
    Row(2, "Python exception on one rank", "its traceback, with rank and step; a restart if asked "
        "for", (JOBS + "test_an_exception_is_shown_with_rank_and_step_at_once",
                ENDS + "[exception]", SUPERVISION
                + "test_the_first_failure_is_said_at_once")),
    Row(3, "SIGSEGV or abort in native code", "as 1", (ENDS + "[segv]", ENDS + "[abort]")),
    Row(4, "SIGTERM, SIGINT or SIGUSR1 to fleetrun or to one rank", "the step is finished, a "
        "checkpoint written, exit code 75 on all ranks; no step is lost",
        (STOPPING + "test_a_signal_ends_the_job_with_75_and_no_step_is_lost",
         SUPERVISION + "test_a_signal_for_one_process_stops_all_ranks_cleanly",
         "tests/unit/engine/test_trainer_stopping.py::"
         "test_a_stop_amid_an_evaluation_does_not_wait_for_it_and_a_resumed_run_makes_it_up")),
    Row(5, "SIGTERM, and SIGKILL 2 s later", "goes on from the newest checkpoint",
        (STOPPING + "test_two_seconds_of_grace_are_enough",)),
    Row(6, "a host is lost with all its ranks", "the others wait for it, with a new attempt",
        (BACK + "[second]",)),
    Row(7, "the host comes back", "it joins the next attempt when the same command is started "
        "there again", (BACK,)),
    Row(8, "the host of rank 0 is lost", "as 6 and 7", (BACK + "[first]",)),
    Row(9, "a rank is stopped (SIGSTOP) or hangs inside a collective", "it is named, the stacks of "
        "all ranks are kept, the job is restarted", (ENDS + "[stop]", NAMED + "[stop]",
         WATCH + "test_a_stopped_rank_is_named_and_stacks_are_kept",
         "tests/unit/launch/test_watchdog_hosts.py::"
         "test_a_stopped_rank_is_named_on_all_hosts")),
    Row(10, "a rank hangs and holds the interpreter's lock", "as 9",
        (ENDS + "[hang-gil]", NAMED + "[hang-gil]")),
    Row(11, "a rank skips a collective", "an error that names it, or as 9; a restart",
        (ENDS + "[skip-collective]", "tests/unit/distributed/test_shm_allreduce.py::"
         "test_ranks_that_come_to_different_collectives_all_say_which")),
    Row(12, "a rank is slow", "it is named, nobody is killed",
        (JOBS + "test_a_slow_rank_is_named_and_nobody_is_killed",
         "tests/unit/engine/test_monitor_stragglers.py::test_a_slow_rank_is_named_within_50_steps")),
    Row(13, "a data worker is killed", "another takes its place, the same batches are made again",
        (BEARS + "[loader-kill@rank1:step3]",
         WORKERS + "test_killed_workers_are_replaced_and_the_stream_stays_as_it_is")),
    Row(14, "a data worker hangs", "as 13, after data.worker_timeout_seconds",
        (BEARS + "[loader-hang@rank1:step3]",
         WORKERS + "test_stopped_workers_are_replaced_and_the_stream_stays_as_it_is",
         ENDS + "[hang]")),
    Row(15, "/dev/shm is too small", "it is not used at all",
        (WORKERS + "test_nothing_lies_in_dev_shm",)),
    Row(16, "a damaged or empty image", "replaced by another on every rank, told and counted; too "
        "many end the run before it starts",
        ("tests/unit/engine/test_data_blocklist.py::"
         "test_one_bad_image_and_as_many_as_the_limit_allows_are_replaced_and_counted",
         "tests/unit/engine/test_data_blocklist.py::"
         "test_two_ranks_stop_together_with_the_same_list_of_too_many_bad_images",
         "tests/unit/data/datasets/test_annotations_fuzz.py::"
         "test_damaged_images_are_found_or_read_but_never_kill_or_hang_a_decoder")),
    Row(17, "a missing image or a bad label", "found before training, and one message",
        ("tests/unit/data/test_validate.py::test_an_audit_finds_every_defect_once",
         "tests/unit/data/datasets/test_annotations_fuzz.py::"
         "test_damaged_annotations_give_findings_or_one_message")),
    Row(18, "a rank has no object in its batch", "the same gradients as one rank with all images",
        ("tests/integration/test_equivalence.py::"
         "test_ranks_and_micro_batches_train_like_one_rank_with_all_the_images",)),
    Row(19, "images do not divide by ranks", "each image once an epoch, as many steps on each rank",
        ("tests/unit/data/test_sampler.py::test_every_image_comes_exactly_once_in_every_epoch",
         "tests/unit/data/test_sampler.py::"
         "test_all_ranks_have_as_many_micro_batches_and_none_is_empty")),
    Row(20, "a rank runs out of memory", "all ranks take smaller micro-batches and repeat the step",
        (AGREEMENT + "test_a_rank_out_of_memory_makes_all_ranks_take_smaller_micro_batches",
         RECOVERY + "test_a_rank_without_memory_makes_all_take_smaller_bites_of_the_same_steps")),
    Row(21, "the loss of one rank is not finite", "all ranks leave the step out; after several in "
        "a row back to the last snapshot with half the rate",
        (AGREEMENT + "test_a_loss_that_is_not_finite_costs_one_step",
         AGREEMENT + "test_losses_that_stay_not_finite_roll_the_job_back_with_half_the_rate",
         RECOVERY + "test_going_back_is_resuming_with_half_the_rate_bit_for_bit")),
    Row(22, "the loss scale collapses (float16)", "it is halved at each overflow and is part of "
        "checkpoints",
        ("tests/unit/engine/test_train_step_amp.py::"
         "test_an_overflow_halves_the_loss_scale_and_a_good_step_keeps_it",)),
    Row(23, "the weights of a rank differ from the others'", "it is named and gets theirs; "
        "without a majority all go back to what they held at the last checkpoint",
        (AGREEMENT + "test_a_flipped_bit_is_found_and_the_rank_is_named",
         RECOVERY + "test_two_ranks_whose_weights_differ_are_named_and_go_back_together")),
    Row(24, "the disk is full at a checkpoint", "training goes on, older checkpoints are whole",
        ("tests/unit/engine/test_checkpoint_writer.py::"
         "test_a_full_disk_keeps_what_it_holds_and_takes_more_when_there_is_room",
         SAVING + "test_a_full_disk_costs_a_checkpoint_and_nothing_else",
         BEARS + "[disk-full=2@rank0:step3]")),
    Row(25, "killed while a checkpoint is written", "never a torn checkpoint",
        (KILLS + "test_a_kill_at_any_call_leaves_whole_checkpoints_and_links_to_them",
         SAVING + "test_a_kill_between_a_checkpoint_and_its_links_is_mended_when_the_run_goes_on")),
    Row(26, "a damaged or shortened checkpoint", "the newest whole one is taken",
        (CHECKPOINTS + "test_the_newest_whole_checkpoint_is_found[flip_a_byte-5]",
         CHECKPOINTS + "test_the_newest_whole_checkpoint_is_found[cut_short-5]",
         KILLS + "test_whatever_file_of_the_newest_is_damaged_the_one_before_is_used")),
    Row(27, "`last` is missing; two trainings in one folder", "the newest whole checkpoint is "
        "taken; the second training is refused",
        (CHECKPOINTS + "test_the_newest_whole_checkpoint_is_found[lose_the_links-9]",
         "tests/unit/common/test_files_lock.py::test_a_second_training_is_refused_until_the_first_is_killed")),
    Row(28, "slow storage", "checkpoints are written in the background",
        (SAVING + "test_slow_storage_does_not_stall_training",
         "tests/unit/engine/test_checkpoint_writer.py::"
         "test_slow_storage_takes_the_newest_that_waits_and_nobody_waits_for_it")),
    Row(29, "the network is away for up to 20 s", "no restart",
        ("tests/unit/launch/test_watchdog_hosts.py::"
         "test_a_network_away_for_20_seconds_is_survived",)),
    Row(30, "the network is divided", "both sides end, and say who is lost",
        (NAMESPACES + "test_a_cable_pulled_during_the_run_ends_both_hosts_by_name",)),
    Row(31, "a port is taken; processes of an earlier job", "a message that says so; nothing "
        "outlives a job", (NAMESPACES + "test_a_port_that_another_program_has_is_named_on_both",
                           STOPPING + "test_nothing_outlives_a_fleetrun_that_was_killed",
                           SUPERVISION + "test_whichever_process_is_killed_nothing_is_left")),
    Row(32, "hosts differ in versions, configuration or data", "refused before the first step, "
        "with the difference",
        ("tests/unit/engine/test_preflight.py::"
         "test_each_kind_of_difference_is_refused_on_every_rank",
         "tests/unit/engine/test_preflight.py::test_data_that_differ_are_named_by_image_and_column")),
    Row(33, "a clock is 10 minutes wrong", "nothing happens: waiting goes by monotonic clocks",
        (BEARS + "[clock=600@rank1:step3]", BEARS + "[clock=-600@rank0:step3]")),
    Row(34, "resumed on another number of ranks", "the same images in the same steps",
        ("tests/unit/engine/test_state_resume_ledger.py::"
         "test_a_change_of_ranks_amid_an_epoch_misses_and_doubles_no_sample",
         "tests/unit/engine/test_state_resume_ranks.py::"
         "test_a_run_goes_on_with_the_same_losses_on_one_two_and_four_ranks",
         "tests/unit/engine/test_train_step_local_sgd.py::"
         "test_a_checkpoint_holds_the_state_of_all_shares_and_resumes_on_any_number_of_ranks")),
    Row(35, "an evaluation fails on one rank", "training is unaffected, it is evaluated again",
        (JOBS + "test_an_evaluation_that_fails_on_one_rank_leaves_training_as_it_was",
         RECOVERY + "test_training_goes_on_without_an_evaluation_that_fails_again")),
    Row(36, "a log cannot be written", "training goes on and says so once",
        (OUTLETS + "test_visualdl_may_fail_in_any_call_and_in_any_way",
         OUTLETS + "test_a_full_disk_leaves_whole_lines_and_is_said_once_an_outlet",
         OUTLETS + "test_a_disk_that_is_read_only_is_said_at_the_start_and_survived_later",
         OUTLETS + "test_training_needs_neither_visualdl_nor_matplotlib")),
    Row(37, "power is lost", "goes on from the newest checkpoint on disk",
        (STOPPING + "test_a_job_that_loses_its_power_goes_on_from_the_newest_checkpoint",)),
    Row(38, "the same step kills a rank again and again", "after two crashes its batches are left "
        "out once",
        (AGREEMENT + "test_a_batch_that_kills_a_rank_twice_is_left_out",
         RECOVERY + "test_a_step_left_out_opens_no_image_and_moves_no_weight")),
)  # fmt: skip
