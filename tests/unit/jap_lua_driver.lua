-- Runs cases against etc/jap.lua under a plain Lua, with a `slurm` and job descriptors that behave as Slurm's do.
-- usage: lua driver.lua JAP_LUA CASES_LUA     CASES_LUA returns a list of cases; prints a JSON list of answers.
-- Strings leave as Latin-1: each byte is one character of the JSON text.

local jap_path, cases_path = arg[1], arg[2]

local function json(value)
   local kind = type(value)
   if kind == "nil" then return "null" end
   if kind == "boolean" then return tostring(value) end
   if kind == "number" then return string.format("%.0f", value) end
   if kind == "string" then
      return '"' .. value:gsub('[%c"\\\127-\255]', function(c) return string.format("\\u%04x", c:byte()) end) .. '"'
   end
   assert(kind == "table", kind)
   local parts = {}
   if value.n or value[1] ~= nil then
      for i = 1, value.n or #value do parts[i] = json(value[i]) end
      return "[" .. table.concat(parts, ",") .. "]"
   end
   for k, v in pairs(value) do parts[#parts + 1] = json(tostring(k)) .. ":" .. json(v) end
   table.sort(parts)
   return "{" .. table.concat(parts, ",") .. "}"
end

local function pack(...) return { n = select("#", ...), ... } end

local logged
local function logger(kind)
   return function(...) logged[#logged + 1] = kind .. ": " .. string.format(...) end
end
slurm = {
   SUCCESS = 0, ERROR = -1, NO_VAL = 4294967294, NO_VAL16 = 65534, INFINITE = 4294967295,
   log_user = logger("user"), log_error = logger("error"), log_info = logger("info"), log_debug = logger("debug"),
}

-- Fields that job_submit/lua lets a script write (Slurm 22.05 to 26.05), those used here, with the type it checks.
local WRITABLE = {
   admin_comment = "string", array_inx = "string", script = "string", std_err = "string", std_in = "string",
   std_out = "string", tres_per_job = "string", tres_per_node = "string", tres_per_task = "string",
   tres_bind = "string", cpus_per_tres = "string", mem_per_tres = "string", time_limit = "number", min_nodes = "number", max_nodes = "number",
   num_tasks = "number", ntasks_per_node = "number", cpus_per_task = "number", pn_min_cpus = "number",
   min_cpus = "number", min_mem_per_node = "number", ntasks_per_tres = "number", time_min = "number", gres = "string",
}
-- What number fields hold when nothing was said (22.05).
local UNSET = {
   time_limit = 4294967294, min_nodes = 4294967294, max_nodes = 4294967294, num_tasks = 4294967294,
   ntasks_per_node = 65534, cpus_per_task = 65534, pn_min_cpus = 65534, min_cpus = 1, ntasks_per_tres = 65534,
   ntasks_per_core = 65534, ntasks_per_socket = 65534, ntasks_per_board = 65534, sockets_per_node = 65534,
   cores_per_socket = 65534, threads_per_core = 65534, het_job_offset = 4294967294, max_cpus = 4294967294,
   time_min = 4294967294, user_id = 1000,
}

local function descriptor(fields, environment, fail_at)
   local writes = {}
   for name, value in pairs(UNSET) do
      if fields[name] == nil then fields[name] = value end
   end
   local jd = setmetatable({}, {
      __index = function(_, name)
         if name == "environment" then
            return setmetatable({}, { __index = function(_, key) return environment[key] end })
         end
         return fields[name == "gres" and "tres_per_node" or name]
      end,
      __newindex = function(_, name, value)
         local kind = WRITABLE[name]
         assert(kind, "a write to the field " .. name)
         assert(type(value) == kind, name .. ": bad argument, a " .. type(value))
         writes[#writes + 1] = name
         if fail_at == name then fail_at = nil error("injected: " .. name) end
         if value == "" then value = nil end
         if name == "min_mem_per_node" then fields.min_mem_per_cpu = nil end
         if name == "gres" then
            name = "tres_per_node"
            value = value and ("gres:" .. value):gsub("^gres:gres:", "gres:")
         end
         fields[name] = value
      end,
   })
   return jd, writes
end

local run = {}

function run.parse_conf(jap, case) return pack(jap.parse_conf(case.text)) end
function run.members(jap, case) return pack(jap.members(case.spec, case.max_size, case.limit)) end
function run.directives(jap, case) return pack(jap.directives(case.script)) end
function run.pattern_uses(jap, case) return pack(jap.pattern_uses(case.pattern, case.letters)) end
function run.own_output(jap, case) return pack(jap.own_output(case.pattern, case.work_dir)) end
function run.uses_job_id(jap, case) return pack(jap.uses_job_id(case.script)) end
function run.carry(jap, case) return pack(jap.carry(case.python, case.facts, case.script)) end

function run.submit(jap, case)
   local jd, writes = descriptor(case.fields, case.environment or {}, case.fail_at)
   if case.conf_path then jap.conf_path = case.conf_path end
   local returned
   for i = 1, case.times or 1 do
      returned = pack(jap.submit(jd, case.parts, 1000))
      if case.then_write then
         local file = assert(io.open(case.then_write.path, "w"))
         file:write(case.then_write.text)
         file:close()
      end
   end
   return { fields = case.fields, writes = pack((table.unpack or unpack)(writes)), returned = returned }
end

local answers, load_jap = {}, assert(loadfile(jap_path))
for i, case in ipairs(assert(loadfile(cases_path))()) do
   logged = {}
   local jap = load_jap() -- each case gets a module that remembers nothing
   local ok, answer = pcall(run[case.run], jap, case)
   answers[i] = { ok = ok, answer = answer, logged = pack((table.unpack or unpack)(logged)) }
   if not ok then answers[i].answer = tostring(answer) end
end
answers.n = #answers
print(json(answers))
