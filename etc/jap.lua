-- jap.lua: turns `sbatch --array=...` of an opted-in script into one coalesced job, inside slurmctld.
--
-- A site's job_submit.lua loads it guarded and calls jap.submit(job_desc, part_list, submit_uid): see job_submit.lua
-- beside this file. What it promises:
--   * It runs under slurmctld's locks: it reads one small file, matches text, computes, and starts nothing. The size of
--     the script, the members and every loop are bounded.
--   * It never rejects a job and never raises. All is computed first; the job is edited at the very end, and put back
--     should an edit fail. What is not understood stays the plain array it was, and one line says why.
--   * A user's text is compared and copied: never run, never a pattern, never a format.
-- It decides as jap-submit does (slurm_jap/submit.py, resources.py); the script's form is slurm_jap/carried.py's.
-- Lua 5.1 to 5.4.

local jap = { VERSION = "1" }

local MAX_SCRIPT = 1024 * 1024 -- bytes of a script that is searched and carried
local MAX_HEADER = 65536 -- bytes of a script in which its #JAP lines stand
local MAX_CONF = 65536 -- bytes of jap.conf
local MAX_VALUE = 4096 -- bytes of a carried value
local COMMENT_ARRAY = 200 -- bytes of an array specification repeated in admin_comment

------------------------------------------------------------------------------------------------------------ small help

-- Slurm's "not set" comes in several widths, and as nil.
local function is_set(value)
   return type(value) == "number"
      and value ~= 65534
      and value ~= 65535
      and value ~= 4294967294
      and value ~= 4294967295
      and value < 2 ^ 62
end

local function positive(value)
   if is_set(value) and value > 0 then
      return value
   end
   return nil
end

local function text_of(value)
   if type(value) == "string" and value ~= "" then
      return value
   end
   return nil
end

local function contains(text, word)
   return text ~= nil and text:find(word, 1, true) ~= nil
end

local function integer(value)
   return string.format("%.0f", value)
end

local function counted(number, noun)
   return integer(number) .. " " .. noun .. (number == 1 and "" or "s")
end

local function ceil_div(a, b)
   return math.floor((a + b - 1) / b)
end

-- What is shown to people: one line of printable characters, not too long.
local function shown(text)
   text = tostring(text):gsub("%c", "?")
   if #text > 300 then
      text = text:sub(1, 297) .. "..."
   end
   return text
end

local function quoted(text)
   return "'" .. shown(text):sub(1, 80) .. "'"
end

local function duration(minutes)
   local days = math.floor(minutes / 1440)
   local rest = minutes - days * 1440
   local hours = math.floor(rest / 60)
   return string.format("%s%02.0f:%02.0f:00", days > 0 and integer(days) .. "-" or "", hours, rest - hours * 60)
end

-------------------------------------------------------------------------------------------------------------- jap.conf

local function count_up_to(limit)
   return function(text)
      local value = text:match("^%d+$") and #text <= 7 and tonumber(text, 10) or nil
      return value and value >= 1 and value <= limit and value or nil
   end
end

local function is_name(text)
   return text:match("^[%w_.%-]+$") and #text <= 64 and text or nil
end

local function is_path(text)
   return text:sub(1, 1) == "/" and not text:find("[\"'$`\\!]") and text or nil
end

local function minutes(text)
   local days, rest = text:match("^(%d+)%-(.*)$")
   rest = rest or text
   if (days and #days > 6) or not rest:match("^[%d:]+$") then
      return nil
   end
   local fields = {}
   for field in (rest .. ":"):gmatch("([^:]*):") do
      if not field:match("^%d+$") or #field > 7 or #fields == 3 then
         return nil
      end
      fields[#fields + 1] = tonumber(field, 10)
   end
   local h, m, s
   if days then
      h, m, s = fields[1], fields[2] or 0, fields[3] or 0
   elseif #fields == 1 then
      h, m, s = 0, fields[1], 0
   elseif #fields == 2 then
      h, m, s = 0, fields[1], fields[2]
   else
      h, m, s = fields[1], fields[2], fields[3]
   end
   local total = (tonumber(days or "0", 10) * 24 + h) * 60 + m + math.floor(s / 60)
   return total >= 1 and total or nil
end

local KIB = { K = 1, M = 1024, G = 1024 ^ 2, T = 1024 ^ 3 }

local function memory_mb(text)
   local number, unit = text:match("^(%d+)([KkMmGgTt]?)$")
   if not number or #number > 9 then
      return nil
   end
   local total = math.floor(tonumber(number, 10) * KIB[unit == "" and "M" or unit:upper()] / 1024)
   return total >= 1 and total or nil
end

-- Lower-case key -> its spelling, whether it stands on a partition's line, what reads its value, the field it fills.
local KEYS = {
   python = { name = "Python", read = is_path, field = "python" },
   maxarraysize = { name = "MaxArraySize", read = count_up_to(4000001), field = "max_array_size" },
   defmempercpu = { name = "DefMemPerCPU", read = memory_mb, field = "default_memory_per_cpu_mb" },
   defmempernode = { name = "DefMemPerNode", read = memory_mb, field = "default_memory_per_node_mb" },
   partition = { name = "Partition", partition = true, read = is_name, field = "name" },
   maxtime = { name = "MaxTime", partition = true, read = minutes, field = "max_time_minutes" },
   maxmembers = { name = "MaxMembers", partition = true, read = count_up_to(1000), field = "max_members" },
   nodecpus = { name = "NodeCPUs", partition = true, read = count_up_to(4000001), field = "node_cpus" },
   nodememory = { name = "NodeMemory", partition = true, read = memory_mb, field = "node_memory_mb" },
   nodegpus = { name = "NodeGPUs", partition = true, read = count_up_to(4000001), field = "node_gpus" },
}

local function parse_conf_line(conf, words)
   local on_partition = words[1]:lower():sub(1, 10) == "partition="
   local target = on_partition and {} or conf
   for position, word in ipairs(words) do
      local name, value = word:match("^([^=]*)=(.*)$")
      if not name then
         return quoted(word) .. " is not Key=Value"
      end
      local key = KEYS[name:lower()]
      conf.named_python = conf.named_python or (key ~= nil and key.name == "Python")
      if not key then
         return "unknown key " .. quoted(name)
      end
      if (key.partition or false) ~= on_partition or (key.name == "Partition" and position > 1) then
         return key.name .. "= may not stand here"
      end
      if target[key.field] ~= nil then
         return key.name .. "= stands twice"
      end
      target[key.field] = key.read(value)
      if target[key.field] == nil then
         return key.name .. "=" .. quoted(value) .. " is no value for it"
      end
   end
   if not on_partition then
      return nil
   end
   if conf.partitions[target.name] then
      return "Partition=" .. target.name .. " stands twice"
   end
   if not target.max_time_minutes then
      return "Partition=" .. target.name .. " lacks MaxTime="
   end
   target.max_members = target.max_members or 64
   conf.partitions[target.name] = target
   conf.names[#conf.names + 1] = target.name
   return nil
end

-- The configuration, or nil, the number of the first faulty line (0: the whole file) and what is wrong there.
function jap.parse_conf(text)
   if #text > MAX_CONF then
      return nil, 0, "larger than " .. MAX_CONF .. " bytes"
   end
   local conf, number = { partitions = {}, names = {} }, 0
   for line in (text .. "\n"):gmatch("([^\n]*)\n") do
      number = number + 1
      local content = line:gsub("#.*$", ""):gsub("^[ \t\r]+", ""):gsub("[ \t\r]+$", "")
      if content:find("[^\t\32-\126]") then
         return nil, number, "a character that is not plain ASCII"
      end
      local words = {}
      for word in content:gmatch("[^ \t]+") do
         words[#words + 1] = word
      end
      local fault = words[1] and parse_conf_line(conf, words)
      if fault then
         return nil, number, fault
      end
   end
   if #conf.names > 0 and not conf.named_python then
      return nil, 0, "Python= is missing"
   end
   conf.max_array_size = conf.max_array_size or 1001
   return conf
end

local HERE = (debug and debug.getinfo(1, "S").source:match("^@(.*/)")) or "/etc/slurm/"
jap.conf_path = HERE .. "jap.conf"

local cache = {}

-- The configuration of jap.conf beside this file. No file: nil. A file with a fault: nil, true (logged once per text).
local function read_conf()
   local file = io.open(jap.conf_path, "rb")
   if not file then
      return nil
   end
   local text = file:read(MAX_CONF + 1) or ""
   file:close()
   if text ~= cache.text then
      local conf, line, fault = jap.parse_conf(text)
      cache = { text = text, conf = conf }
      if not conf then
         local message = "jap: %s:%.0f: %s; nothing is coalesced until it is mended (jap-submit --jap-check-conf %s)"
         slurm.log_error(message, jap.conf_path, line, fault, jap.conf_path)
      end
   end
   return cache.conf, cache.conf == nil
end

--------------------------------------------------------------------------------------------------- array specification

local LONG_MAX = 9.2e18

-- C's strtol: the number at `start` and the position after it; no number: 0 and `start`.
local function leading_number(text, start)
   local sign, digits, stop = text:match("^[ \t\n\v\f\r]*([+-]?)(%d+)()", start)
   if not digits then
      return 0, start
   end
   local value = #digits > 15 and LONG_MAX or tonumber(digits, 10)
   return sign == "-" and -value or value, stop
end

local function parse_token(token, max_size)
   local function past_bracket(position)
      return token:sub(position, position) == "]" and position + 1 or position
   end
   local function at_end(position)
      return position > #token or token:sub(position, position) == "%"
   end
   local first, stop = leading_number(token, token:sub(1, 1) == "[" and 2 or 1)
   stop = past_bracket(stop)
   local last, step = first, 1
   if token:sub(stop, stop) == "-" then
      last, stop = leading_number(token, stop + 1)
      stop = past_bracket(stop)
      if token:sub(stop, stop) == ":" then
         step, stop = leading_number(token, stop + 1)
         stop = past_bracket(stop)
         if step < 1 or step >= max_size then
            return nil
         end
      end
   end
   if first < 0 or not at_end(stop) or last < first or last >= max_size then
      return nil
   end
   return first, last, step
end

-- How many members a specification names and how many may run at once (nil: all), as Slurm and array_spec.py read it.
-- Counting stops beyond `limit`. nil: Slurm refuses the specification, or makes no array of it.
function jap.members(spec, max_size, limit)
   if #spec > 4096 then
      return nil
   end
   local seen, count = {}, 0
   for token in (spec .. ","):gmatch("([^,]*),") do
      if token ~= "" then
         local first, last, step = parse_token(token, max_size)
         if not first then
            return nil
         end
         for index = first, last, step do
            if count > limit then
               break
            end
            if not seen[index] then
               seen[index], count = true, count + 1
            end
         end
      end
   end
   if count == 0 then
      return nil
   end
   local percent = spec:find("%", 1, true)
   local throttle = percent and leading_number(spec, percent + 1) or 0
   throttle = math.abs(throttle) < 2 ^ 53 and (throttle + 2 ^ 31) % 2 ^ 32 - 2 ^ 31 or 0 -- Slurm keeps it in 32 bits
   return count, throttle > 0 and throttle or nil
end

------------------------------------------------------------------------------------------------------- #JAP directives

-- Appends the words of one directive line, cut as sbatch cuts #SBATCH lines: quotes group, a backslash protects, an
-- unquoted # begins a comment. Gives what is wrong with the line, if anything is.
local function append_words(words, line)
   local position = 1
   while true do
      position = line:find("%S", position)
      if not position then
         return nil
      end
      local rest = line:sub(position, position + 7):lower()
      local separator = rest:find("^packjob%s") or rest == "packjob" or rest:find("^hetjob%s") or rest == "hetjob"
      if separator or rest:sub(1, 1) == ":" then
         return "a #JAP line that is not understood"
      end
      local word, quote, escaped = {}, nil, false
      while position <= #line do
         local c = line:sub(position, position)
         if not quote and c:find("%s") then
            if escaped then
               return "a #JAP line with a backslash before a space"
            end
            break
         end
         if escaped then
            escaped = false
            word[#word + 1] = c
         elseif c == "\\" then
            escaped = true
         elseif quote then
            if c == quote then
               quote = nil
            else
               word[#word + 1] = c
            end
         elseif c == '"' or c == "'" then
            quote = c
         elseif c == "#" then
            break
         else
            word[#word + 1] = c
         end
         position = position + 1
      end
      if quote then
         return "a #JAP line with an unmatched " .. quote
      end
      if #word == 0 then
         return nil
      end
      words[#words + 1] = table.concat(word)
   end
end

local function positive_count(text)
   local value = text:match("^%d+$") and #text <= 9 and tonumber(text, 10) or nil
   return value and value >= 1 and value or nil
end

local function mebibytes(text)
   local number, unit = text:upper():match("^%s*(%d+)([KMGT]?)B?%s*$")
   local value = number and #number <= 15 and tonumber(number, 10) or 0
   if value == 0 then
      return nil
   end
   return unit == "K" and ceil_div(value, 1024) or value * KIB[unit == "" and "M" or unit] / 1024
end

local function one_of_goals(text)
   -- The plugin knows no network: goals are for jap-submit, which plans.
   return (text == "throughput" or text == "finish" or text == "gpu-hours") and text or nil
end

local DIRECTIVES = {
   ["--stages"] = positive_count,
   ["--groups"] = positive_count,
   ["--member-mem"] = mebibytes,
   ["--member-cpus"] = positive_count,
   ["--goal"] = one_of_goals,
   ["--memory-per-device"] = mebibytes,
   ["--shared-job-id"] = "flag",
}

local function read_directives(found, words)
   local position = 1
   while words[position] do
      local word = words[position]
      local key, equals, value = word:match("^([^=]*)(=?)(.*)$")
      local read = DIRECTIVES[key]
      position = position + 1
      if not read then
         return "unknown #JAP key " .. quoted(word)
            .. " (the keys are --stages, --groups, --member-mem, --member-cpus, --goal, --memory-per-device,"
            .. " --shared-job-id)"
      end
      if read == "flag" then
         if equals ~= "" then
            return "#JAP " .. key .. " takes no value"
         end
         found[key] = true
      else
         if equals == "" then
            value = words[position]
            position = position + 1
            if not value or value:sub(1, 2) == "--" then
               return "#JAP " .. key .. " needs a value"
            end
         end
         found[key] = read(value)
         if found[key] == nil then
            return "#JAP " .. key .. "=" .. shown(value):sub(1, 80) .. " is no value for it"
         end
      end
   end
   return nil
end

-- The options of the script's #JAP lines; nil: it has none. Second value: what is wrong with them, if anything is.
-- They stand where #SBATCH lines may stand: before the first line that is neither blank nor a comment. All of them form
-- one list of words.
function jap.directives(script)
   local words, fault, ended = nil, nil, #script <= MAX_HEADER
   for line in (script:sub(1, MAX_HEADER) .. "\n"):gmatch("([^\n]*)\n") do
      local rest = line:match("^#JAP(.*)$")
      if rest and (rest == "" or rest:find("^%s") or rest:sub(1, 2) == "--") then
         words = words or {}
         fault = fault or append_words(words, rest)
      elseif line:find("^%s*[^%s#]") then
         ended = true
         break
      end
   end
   if not words then
      return nil
   end
   fault = fault or not ended and "more than " .. integer(MAX_HEADER) .. " bytes of comments begin the script" or nil
   local found = {}
   return found, fault or read_directives(found, words)
end

------------------------------------------------------------------------------------------------------- output patterns

-- Whether expansion of a pattern replaces any of `letters`.
function jap.pattern_uses(pattern, letters)
   if not pattern or contains(pattern, "\\") or pattern:lower() == "none" then
      return false
   end
   local position = 1
   while true do
      local start = pattern:find("%", position, true)
      if not start then
         return false
      end
      local letter, stop = pattern:match("^%%%d*(.?)()", start)
      if letter == "%" and stop > start + 2 then
         stop = stop - 1
      elseif letter ~= "" and contains(letters, letter) then
         return true
      end
      position = math.max(stop, start + 1)
   end
end

-- Where the coalesced job's own output goes: beside the members' files, in the folder that no % precedes.
local OWN_OUTPUT = "jap-%j.out"

function jap.own_output(pattern, work_dir)
   local head = ""
   if pattern and pattern:lower() ~= "none" then
      -- A backslash switches expansion off and goes.
      head = contains(pattern, "\\") and pattern:gsub("\\(\\?)", "%1") or pattern:match("^[^%%]*")
   end
   local folder = head:match("^(.*)/") or ""
   if folder == "" and head:sub(1, 1) == "/" then
      folder = "/"
   end
   if folder == "/dev" or folder:sub(1, 5) == "/dev/" then
      folder = ""
   end
   if folder == "" then
      folder = work_dir
   elseif folder:sub(1, 1) ~= "/" then
      folder = work_dir:gsub("/+$", "") .. "/" .. folder
   end
   if contains(folder, "\\") then
      return OWN_OUTPUT -- Slurm expands nothing in the working directory that it puts before a relative name
   end
   return folder:gsub("/+$", ""):gsub("%%", "%%%%") .. "/" .. OWN_OUTPUT
end

-- Whether a line that is no comment names SLURM_JOB_ID or SLURM_JOBID.
function jap.uses_job_id(script)
   for line in (contains(script, "SLURM_JOB") and script or ""):gmatch("[^\n]+") do
      if not line:find("^%s*#") and line:find("%f[%w_]SLURM_JOB_?ID%f[^%w_]") then
         return true
      end
   end
   return false
end

------------------------------------------------------------------------------------------------------------ the script

-- The carried script, byte for byte what carried.build writes without #SBATCH lines.
local FACTS = {
   "array", "output", "error", "input", "open_mode", "script_name", "stages", "groups", "member_cpus", "member_mem_mb",
   "member_time_min", "memory_per_device_mb", "gres", "at_once",
}

function jap.carry(python, facts, script)
   local lines = {
      "#!/bin/bash",
      'if [ ! -x "' .. python .. '" ]; then echo "jap: ' .. python .. " not found on $(hostname): "
         .. "ask the administrator to install slurm_jap there, or submit with JAP=0 for a plain array\" >&2; "
         .. "exit 127; fi",
      'exec "' .. python .. '" -I -m slurm_jap.run "$0" "$@"',
   }
   for _, name in ipairs(FACTS) do
      local value = facts[name]
      if type(value) == "number" then
         value = integer(value)
      end
      if value ~= nil and value ~= "" then
         lines[#lines + 1] = "#JAP-CARRIED " .. name .. "=" .. value
      end
   end
   lines[#lines + 1] = "#JAP-USER-SCRIPT"
   return table.concat(lines, "\n") .. "\n" .. script
end

---------------------------------------------------------------------------------------------------- what was asked for

-- Computing stops here; pcall brings the reason back. Not an error of ours: those are strings.
local function unclear(reason)
   error({ reason = reason }, 0)
end

-- GPUs in "gres:gpu:a100:4", "gres/gpu:4", "gpu": their type ("": any) and number; number 0: none. Items for CPUs,
-- which tres_per_task holds from 23.11 on, say what cpus_per_task says.
local function gpus_in(text, option)
   local gpu_type, number
   for item in ((text or "") .. ","):gmatch("([^,]*),") do
      local name = item:gsub("^gres[:/]", "")
      if item ~= "" and not name:find("^cpu[:=]%d+$") then
         local rest, count = name:match("^gpu(.-)[:=](%d+)$")
         if not rest then
            rest, count = name:match("^gpu(.*)$"), "1"
         end
         local kind = rest == "" and "" or (rest or ""):match("^:([%w_.%-]+)$")
         if not kind or #count > 6 then
            unclear(option .. " asks for " .. quoted(item) .. ", not for GPUs alone")
         elseif number and kind ~= gpu_type then
            unclear(option .. " asks for GPUs of several types")
         end
         gpu_type, number = kind, (number or 0) + tonumber(count, 10)
      end
   end
   return gpu_type or "", number or 0
end

-- The number in "gres:gpu:2" (--cpus-per-gpu, --mem-per-gpu); nil: not asked.
local function per_gpu(text, option)
   if not text_of(text) then
      return nil
   end
   local number = text:match("^gres[:/]gpu[:=](%d+)$")
   if not number or #number > 12 then
      unclear(option .. " " .. quoted(text) .. " is not understood")
   end
   return tonumber(number, 10)
end

-- Fields that say nothing certain about a job which several members share.
local UNCLEAR = {
   { "tres_per_socket", "--gpus-per-socket" },
   { "ntasks_per_core", "--ntasks-per-core" },
   { "ntasks_per_socket", "--ntasks-per-socket" },
   { "ntasks_per_board", "--ntasks-per-board" },
   { "ntasks_per_tres", "--ntasks-per-gpu" },
   { "sockets_per_node", "--sockets-per-node" },
   { "cores_per_socket", "--cores-per-socket" },
   { "threads_per_core", "--threads-per-core" },
   { "core_spec", "--core-spec" },
   { "thread_spec", "--thread-spec" },
   { "max_cpus", "a largest number of CPUs" },
}

-- What one member asks for, over all its nodes: resources.member_request, from the job's fields.
local function member_request(jd)
   for _, pair in ipairs(UNCLEAR) do
      local value = text_of(jd[pair[1]]) or positive(jd[pair[1]])
      -- --hint=nomultithread sets threads_per_core too, and often stands in everybody's environment.
      if value and not (pair[1] == "threads_per_core" and text_of(jd.environment.SLURM_HINT)) then
         unclear(pair[2] .. " says nothing certain about a job that several members share")
      end
   end
   local binding = text_of(jd.tres_bind)
   if binding and not binding:find("^gres/gpu[%w_.:%-]-:per_task:%d+$") then -- that, --gpus-per-task says from 24.11 on
      unclear("--gpu-bind says nothing certain about a job that several members share")
   end
   local member = {}
   local low, high = positive(jd.min_nodes), positive(jd.max_nodes)
   if high and low ~= high then
      unclear("a range of nodes")
   end
   local tasks, per_node = positive(jd.num_tasks), positive(jd.ntasks_per_node)
   low = low or (tasks and per_node and ceil_div(tasks, per_node))
   member.nodes = low or 1
   tasks = tasks or (per_node and per_node * member.nodes) or member.nodes

   local gpus, spread
   for _, way in ipairs({
      { "tres_per_job", "--gpus", 1 },
      { "tres_per_node", "--gres", member.nodes },
      { "tres_per_task", "--gpus-per-task", tasks },
   }) do
      local gpu_type, number = gpus_in(text_of(jd[way[1]]), way[2])
      if number > 0 then
         number = number * way[3]
         if gpus and (gpus ~= number or member.gpu_type ~= gpu_type) then
            unclear("different numbers of GPUs are asked for")
         end
         gpus, member.gpu_type = number, gpu_type
         spread = spread or way[1] == "tres_per_node"
      end
   end
   member.gpus = gpus or 0
   -- Where nothing says how many nodes --gpus=8 is spread over, Slurm decides that later.
   member.nodes_known = low ~= nil or spread or member.gpus <= 1

   local per_task, each = positive(jd.cpus_per_task), per_gpu(jd.cpus_per_tres, "--cpus-per-gpu")
   if per_task then
      member.cpus = tasks * per_task
   elseif each and member.gpus > 0 then
      member.cpus = member.gpus * each
   elseif tasks > member.nodes then
      member.cpus = tasks
   end
   local least = positive(jd.pn_min_cpus)
   if least then
      member.cpus = math.max(member.cpus or 1, member.nodes * least)
   end

   local node_mb, cpu_mb = jd.min_mem_per_node, positive(jd.min_mem_per_cpu)
   local gpu_mb = per_gpu(jd.mem_per_tres, "--mem-per-gpu")
   if is_set(node_mb) then
      member.memory_mb = node_mb * member.nodes
   elseif cpu_mb then
      member.memory_mb = cpu_mb * (member.cpus or tasks)
   elseif gpu_mb then
      member.memory_mb = gpu_mb * member.gpus
   end
   return member
end

---------------------------------------------------------------------------------------------------------------- sizing

local function least(a, b)
   return a and b and math.min(a, b) or a or b
end

-- What the partition allows: jap.conf's word, within what Slurm's own partition record says.
local function limits_of(defaults, conf, part)
   local total_nodes, total_cpus = positive(part.total_nodes), positive(part.total_cpus)
   local share = total_nodes and total_cpus and math.floor(total_cpus / total_nodes)
   local per_node, per_cpu = positive(part.def_mem_per_node), positive(part.def_mem_per_cpu)
   if not per_node and not per_cpu then
      per_node, per_cpu = defaults.default_memory_per_node_mb, defaults.default_memory_per_cpu_mb
   end
   local cpus = least(conf.node_cpus or positive(share), positive(part.max_cpus_per_node))
   local memory = least(conf.node_memory_mb, positive(part.max_mem_per_node))
   local most_per_cpu = positive(part.max_mem_per_cpu)
   if conf.node_memory_mb and most_per_cpu and cpus then -- beyond it Slurm would ask for more CPUs than there are
      memory = math.min(memory, most_per_cpu * cpus)
   end
   return {
      max_time = least(conf.max_time_minutes, positive(part.max_time)),
      default_time = positive(part.default_time),
      max_nodes = least(total_nodes, positive(part.max_nodes)),
      cpus = cpus,
      memory = memory,
      gpus = conf.node_gpus,
      default_per_node = per_node,
      default_per_cpu = per_cpu,
   }
end

local function spread_gpus(member, total, limits)
   local nodes = member.nodes
   if total > 0 then
      nodes = math.min(nodes, total)
   end
   if limits.gpus and total > nodes * limits.gpus then
      nodes = ceil_div(total, limits.gpus)
   end
   if limits.max_nodes and nodes > limits.max_nodes then
      unclear(counted(nodes, "node") .. " needed, the partition has or allows " .. integer(limits.max_nodes))
   end
   local per_node = ceil_div(total, nodes)
   if not limits.gpus and total > 0 then
      if not member.nodes_known or per_node > ceil_div(member.gpus, member.nodes) then
         unclear("how many GPUs a node has is not known here: give --nodes and --gpus-per-node, or have NodeGPUs= set")
      end
   end
   return nodes, per_node
end

local function default_memory(member, cpus, limits)
   if limits.default_per_cpu then
      return cpus * limits.default_per_cpu
   end
   return limits.default_per_node and member.nodes * limits.default_per_node
end

local function job_time(member_time, rounds, limits)
   if member_time == 4294967295 then
      unclear("no time limit is asked for, coalesced jobs may ask for " .. duration(limits.max_time) .. ": give --time")
   end
   local own = is_set(member_time) and member_time or limits.default_time
   if not own then
      if rounds > 1 then
         unclear("no --time is given, and the partition's longest cannot be multiplied: give --time")
      end
      return nil, limits.max_time
   end
   if own * rounds > limits.max_time then
      unclear(
         integer(rounds) .. " x " .. duration(own) .. " (members of a group one after the other) exceed the "
            .. duration(limits.max_time) .. " that coalesced jobs may ask for: give less --time, or more #JAP --groups"
      )
   end
   return own * rounds, own
end

-- resources.plan: what the coalesced job asks for, for `members` members, `throttle` of them at once (nil: all).
local function plan(member, asked, members, throttle, limits, member_time)
   local stages, groups = asked["--stages"] or math.max(1, member.gpus), asked["--groups"] or 1
   local engines = stages * groups
   local nodes, gpus_per_node = spread_gpus(member, member.gpus > 0 and engines or 0, limits)
   if member.gpus == 0 then
      nodes = math.min(nodes, engines)
   end

   local own_cpus = member.cpus or 1
   local member_cpus = asked["--member-cpus"] or ceil_div(own_cpus, member.nodes)
   local engine_cpus = ceil_div(math.max(engines, groups * own_cpus), nodes)
   engine_cpus = least(engine_cpus, limits.cpus)

   local own_memory = member.memory_mb or default_memory(member, own_cpus, limits)
   local member_memory = asked["--member-mem"] or positive(own_memory) and ceil_div(own_memory, member.nodes)
   local whole_node = own_memory == 0 or (own_memory == nil and asked["--member-mem"] ~= nil)
   local engine_memory = ceil_div(groups * (own_memory or 0), nodes)

   local wished = throttle and math.min(members, throttle) or members
   local per_node = ceil_div(wished, nodes)
   if limits.cpus and asked["--member-cpus"] then -- else members share a node's CPUs, as processes do
      per_node = math.min(per_node, math.max(1, math.floor((limits.cpus - engine_cpus) / member_cpus)))
   end
   if member_memory then
      if not limits.memory then
         unclear("how much memory a node has is not known here: have NodeMemory= set in jap.conf")
      end
      local fit = math.floor((limits.memory - engine_memory) / member_memory)
      if fit < 1 then
         unclear(
            "a node has " .. integer(limits.memory) .. " MiB; the engines need " .. integer(engine_memory)
               .. ", a member " .. integer(member_memory)
               .. ": say with #JAP --member-mem how much a member's own process needs, or give less --mem"
         )
      end
      per_node = math.min(per_node, fit)
   end

   local time, task_time = job_time(member_time, ceil_div(members, groups), limits)
   local at_once = math.min(wished, nodes * per_node)
   local gpu_kind = member.gpu_type ~= "" and "gpu:" .. (member.gpu_type or "") or "gpu"
   return {
      stages = stages,
      groups = groups,
      nodes = nodes,
      gres = gpus_per_node > 0 and gpu_kind .. ":" .. integer(gpus_per_node) or "",
      cpus_per_node = least(engine_cpus + per_node * member_cpus, limits.cpus),
      memory_per_node = (whole_node and 0) or (member_memory and engine_memory + per_node * member_memory) or nil,
      time = time,
      at_once = at_once,
      member_cpus = member_cpus,
      member_memory = member_memory or nil,
      member_time = at_once < members and task_time and task_time * ceil_div(at_once, groups) or nil,
   }
end

--------------------------------------------------------------------------------------------------------------- the job

local function partition_of(jd, parts)
   local name = text_of(jd.partition)
   if name then
      return name
   end
   for candidate, part in pairs(parts) do
      if part.flag_default == 1 then
         return candidate
      end
   end
   return nil
end

local function script_name(jd)
   local arguments = jd.argv
   return type(arguments) == "table" and text_of(arguments[0]) or ""
end

local OPEN_MODES = { a = "append", t = "truncate" }

-- Values that cannot stand in a line of the carried script.
local function check_facts(facts)
   for name, value in pairs(facts) do
      if type(value) == "string" and (value:find("[%z\1-\8\10-\31]") or #value > MAX_VALUE) then
         unclear("the value of " .. name .. " holds a line break, or is too long")
      end
   end
end

-- Fields of requests that only a task of its own can have.
local UNSHARED = {
   { "time_min", "--time-min says nothing certain about a job that several members share" },
   { "container", "its tasks run in a container of Slurm's" },
   { "burst_buffer", "a burst buffer is asked for per task" },
}

-- All edits that make the coalesced job, in order; raises unclear(reason) where the array must stay plain.
local function edits_for(jd, parts, conf, script, asked, fault)
   if is_set(jd.het_job_offset) then
      unclear("a heterogeneous job")
   end
   local name = partition_of(jd, parts)
   if contains(name, ",") then
      unclear("several partitions are named")
   end
   if contains(text_of(jd.clusters), ",") or jd.clusters == "all" then
      unclear("several clusters are named")
   end
   local part, enabled = name and parts[name], name and conf.partitions[name]
   if not part or not enabled then
      unclear("partition " .. quoted(name or "") .. " is not enabled for coalescing (enabled: "
         .. table.concat(conf.names, ", ") .. ")")
   end
   if fault then
      unclear(fault)
   end
   if #script > MAX_SCRIPT then
      unclear("the script is larger than " .. integer(MAX_SCRIPT) .. " bytes")
   end
   local spec = jd.array_inx
   local members, throttle = jap.members(spec, conf.max_array_size, enabled.max_members)
   if not members then
      return nil -- Slurm refuses it, in its own words
   end
   if members > enabled.max_members then
      unclear("more than the " .. integer(enabled.max_members) .. " members that may be coalesced: split the array")
   end
   for _, pair in ipairs(UNSHARED) do
      if text_of(jd[pair[1]]) or positive(jd[pair[1]]) then
         unclear(pair[2])
      end
   end
   if is_set(jd.shared) and jd.shared ~= 1 then
      unclear("--exclusive gives every task nodes of its own")
   end
   if contains(text_of(jd.dependency), "aftercorr") then
      unclear("--dependency=aftercorr pairs tasks with tasks")
   end
   local output, errors = text_of(jd.std_out), text_of(jd.std_err)
   if not asked["--shared-job-id"] then
      for _, pattern in ipairs({ output or "", errors or "" }) do
         if jap.pattern_uses(pattern, "jJ") and not jap.pattern_uses(pattern, "a") then
            unclear("the output pattern " .. quoted(pattern) .. " has %j without %a, and members share one job id")
         end
      end
      if jap.uses_job_id(script) then
         unclear("its script uses SLURM_JOB_ID, which members share (#JAP --shared-job-id says that it copes)")
      end
   end

   local limits = limits_of(conf, enabled, part)
   local wanted = plan(member_request(jd), asked, members, throttle, limits, jd.time_limit)
   local input = text_of(jd.std_in)
   local facts = {
      array = spec,
      output = output,
      error = errors,
      input = input ~= "/dev/null" and input or nil,
      -- From 24.11 on only the batch step's own environment tells; jap-run looks there.
      open_mode = OPEN_MODES[jd.environment.SLURM_OPEN_MODE or ""],
      script_name = script_name(jd),
      stages = wanted.stages,
      groups = wanted.groups,
      member_cpus = wanted.member_cpus,
      member_mem_mb = wanted.member_memory,
      member_time_min = wanted.member_time,
      memory_per_device_mb = asked["--memory-per-device"],
      gres = wanted.gres,
      at_once = wanted.at_once,
   }
   check_facts(facts)

   local edits = {}
   local function set(field, value)
      edits[#edits + 1] = { field, value }
   end
   local function clear(field)
      if text_of(jd[field]) then
         set(field, "")
      end
   end
   set("min_nodes", wanted.nodes)
   set("max_nodes", wanted.nodes)
   set("num_tasks", wanted.nodes)
   set("ntasks_per_node", 1)
   set("cpus_per_task", wanted.cpus_per_node)
   set("pn_min_cpus", wanted.cpus_per_node)
   set("min_cpus", wanted.nodes * wanted.cpus_per_node)
   clear("tres_per_job")
   clear("tres_per_task")
   clear("tres_bind")
   clear("cpus_per_tres")
   clear("mem_per_tres")
   if wanted.gres ~= "" then
      set("gres", wanted.gres) -- Slurm puts its version's prefix before it
   else
      clear("tres_per_node")
   end
   if wanted.time then
      set("time_limit", wanted.time)
   end
   set("std_out", jap.own_output(output, text_of(jd.work_dir) or "/"))
   clear("std_err")
   set("std_in", "/dev/null")
   local array = #spec <= COMMENT_ARRAY and spec or spec:sub(1, COMMENT_ARRAY) .. "..."
   local comment = "jap:v" .. jap.VERSION .. " array=" .. array .. " members=" .. integer(members)
      .. " stages=" .. integer(wanted.stages) .. " groups=" .. integer(wanted.groups)
   local before = text_of(jd.admin_comment)
   set("admin_comment", before and comment .. "; " .. before or comment)
   set("script", jap.carry(conf.python, facts, script))
   set("array_inx", "") -- nil would raise
   if wanted.memory_per_node then
      set("min_mem_per_node", wanted.memory_per_node)
   end

   local memory = ""
   if wanted.memory_per_node then
      memory = wanted.memory_per_node == 0 and " and all memory"
         or " and " .. integer(wanted.memory_per_node) .. " MiB"
   end
   local gpus = wanted.gres ~= "" and " with " .. wanted.gres or ""
   local message = counted(members, "member") .. " in one job: " .. counted(wanted.nodes, "node") .. gpus .. ", "
      .. counted(wanted.cpus_per_node, "CPU") .. memory .. " each, "
      .. counted(wanted.stages, "stage") .. " x " .. counted(wanted.groups, "group") .. ", "
      .. (wanted.time and duration(wanted.time) or "the partition's time limit")
      .. (wanted.at_once < members and ", " .. integer(wanted.at_once) .. " at once" or "")
   return edits, message
end

-- Edits the job; an edit that fails is undone with all before it.
local function apply(jd, edits)
   local done = {}
   for _, edit in ipairs(edits) do
      local field, value = edit[1], edit[2]
      local before = jd[field]
      local ok, fault = pcall(function()
         jd[field] = value
      end)
      done[#done + 1] = { field, before }
      if not ok then
         for i = #done, 1, -1 do
            pcall(function()
               jd[done[i][1]] = done[i][2] or ""
            end)
         end
         error(tostring(fault), 0)
      end
   end
end

local function consider(jd, parts)
   local spec, script = text_of(jd.array_inx), text_of(jd.script)
   if not spec or not script or not contains(script, "#JAP") then
      return
   end
   local asked, fault = jap.directives(script)
   if not asked or jd.environment.JAP == "0" then
      return
   end
   local conf, broken = read_conf()
   if broken then
      slurm.log_user("%s", "jap: plain array: this site's jap.conf has a fault, tell the administrator")
      return
   end
   if not conf or #conf.names == 0 then
      return
   end
   local ok, edits, message = pcall(edits_for, jd, parts, conf, script, asked, fault)
   if not ok and type(edits) == "table" and edits.reason then
      slurm.log_user("%s", "jap: plain array: " .. shown(edits.reason))
      return
   elseif not ok then
      error(edits, 0)
   elseif edits then
      apply(jd, edits)
      slurm.log_user("%s", "jap: " .. message)
      slurm.log_info("%s", "jap: uid " .. integer(jd.user_id or 0) .. ": " .. message)
   end
end

-- The hook. Whatever happens, the job goes on: coalesced, or exactly as it was.
function jap.submit(job_desc, part_list, submit_uid)
   local ok, fault = pcall(consider, job_desc, part_list)
   if not ok then
      pcall(function()
         slurm.log_error("%s", "jap: internal error, the job stays as it was: " .. shown(fault))
         slurm.log_user("%s", "jap: plain array: an internal error, see slurmctld's log")
      end)
   end
end

return jap
